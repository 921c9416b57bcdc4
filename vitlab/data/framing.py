"""The fixed framing of evaluation, picture in, picture out; without torch, so that small processes can do it too."""

from PIL import Image

from vitlab.models.config import Preprocess, Size

FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}
LONGEST = 50  # a picture this many times longer than wide is cut first: scaling all of it could fill the memory


def frame(image: Image.Image, size: Size, preprocess: Preprocess) -> Image.Image:
    """Scale to cover `size / crop` and cut the center, or stretch; of an extremely long picture only the middle."""
    height, width = size
    kind = FILTERS[preprocess.interpolation]
    if preprocess.fit == "stretch":
        return image.resize((width, height), kind)
    image = middle(image)
    least_h, least_w = int(height / preprocess.crop), int(width / preprocess.crop)
    if image.width * least_h <= image.height * least_w:  # the width is what has to stretch most
        scaled = least_w, max(least_h, int(least_w * image.height / image.width))
    else:
        scaled = max(least_w, int(least_h * image.width / image.height)), least_h
    left, top = round((scaled[0] - width) / 2), round((scaled[1] - height) / 2)
    return image.resize(scaled, kind).crop((left, top, left + width, top + height))


def middle(image: Image.Image) -> Image.Image:
    width, height = image.size
    longest = LONGEST * min(width, height)
    if max(width, height) <= longest:
        return image
    across, down = min(width, longest), min(height, longest)
    left, top = (width - across) // 2, (height - down) // 2
    return image.crop((left, top, left + across, top + down))
