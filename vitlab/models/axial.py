"""Axial attention (the paper's appendix D.6): attend along rows, then along columns, an MLP after each."""

from torch import Tensor, nn

from vitlab.models.config import Size


class AxialBlock(nn.Module):
    """Two ordinary encoder blocks; the first sees each row of the grid as a sequence, the second each column."""

    def __init__(self, rows: nn.Module, columns: nn.Module, grid: Size) -> None:
        super().__init__()
        self.rows, self.columns, self.grid = rows, columns, grid

    def forward(self, x: Tensor) -> Tensor:
        x = self.rows(x.unflatten(1, self.grid))  # (B, h, w, D)
        x = self.columns(x.transpose(1, 2)).transpose(1, 2)
        return x.flatten(1, 2)  # (B, N, D)
