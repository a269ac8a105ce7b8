"""What a network needs its inputs to be."""


def image_shape(input_shape: tuple[int, ...], smallest: int = 1) -> tuple[int, int, int]:
    """Channels, height and width of the data's images.

    Raises:
        ValueError: no images, or a side of less than `smallest`.

    """
    if len(input_shape) != 3:
        raise ValueError(
            f"the data has inputs of shape {input_shape}; expected images (channels, height, width): "
            "take mlr or dnn"
        )
    channels, height, width = input_shape
    if min(height, width) < smallest:
        raise ValueError(
            f"images of {height}x{width} are too small; it needs {smallest}x{smallest} at least: take mlr or dnn"
        )
    return channels, height, width
