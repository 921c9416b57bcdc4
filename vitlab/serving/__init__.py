"""The HTTP server: routes and a page, a queue that forms batches, and limits on everything that comes in."""

from vitlab.errors import UserError


def require_packages() -> None:
    """Raise UserError where a package that serving needs is not installed; every other file here imports them."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import python_multipart  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(f"serving needs {error.name}: pip install 'vitlab[serve]'") from None
