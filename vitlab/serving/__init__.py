"""The HTTP server: routes and a page, a queue that forms batches, and limits on everything that comes in."""

from importlib import import_module

from vitlab.errors import UserError


def require_packages() -> None:
    """Raise UserError where a package that serving needs is not installed; every other file here imports them."""
    try:
        for name in ("fastapi", "prometheus_client", "python_multipart", "uvicorn"):
            import_module(name)
    except ImportError as error:
        raise UserError(f"serving needs {error.name}: pip install 'vitlab[serve]'") from None
