"""A model behind a page: HTTP, a queue that makes batches, and limits on everything that comes in."""

from vitlab.errors import UserError


def require_packages() -> None:
    """A sentence where what serving needs is not installed; every other file here imports it."""
    try:
        import fastapi  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(f"serving needs {error.name}: pip install 'vitlab[serve]'") from None
