r"""ROIAlign of one box and its map, sample by sample.

.. math::
    o_{c,p,q} = \frac{1}{n_y n_x} \sum_{s,t} \sum_{i,j}
        \max(0, 1 - |y_{ps} - i|)\, \max(0, 1 - |x_{qt} - j|)\, m_{c,i,j}

Source: He et al., "Mask R-CNN" (ICCV 2017), section 3; borders and ``aligned`` are treated as in
torchvision.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def roi_align(
    maps: Tensor,
    rois: Tensor,
    output_size: tuple[int, int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    aligned: bool = False,
) -> Tensor:
    """Return the bins of boxes of shape (K, 5), in the dtype of the maps."""
    height, width = maps.shape[2:]
    results = []
    for image, *corners in rois.tolist():
        x1, y1, x2, y2 = (corner * spatial_scale - 0.5 * aligned for corner in corners)
        rows = weights(y1, y2, output_size[0], height, sampling_ratio, aligned).to(maps)
        columns = weights(x1, x2, output_size[1], width, sampling_ratio, aligned).to(maps)
        results.append(torch.einsum("pi,qj,cij->cpq", rows, columns, maps[int(image)]))
    return torch.stack(results)


def weights(
    start: float, end: float, bins: int, size: int, sampling_ratio: int, aligned: bool
) -> Tensor:
    """Return each pixel's weight in each bin along one side: (bins, size), float64."""
    whole = end - start if aligned else max(end - start, 1.0)
    samples = sampling_ratio if sampling_ratio > 0 else max(math.ceil(whole / bins), 0)
    result = torch.zeros(bins, size, dtype=torch.float64)
    for p in range(bins):
        for s in range(samples):
            at = start + p * whole / bins + (s + 0.5) * whole / bins / samples
            if -1 <= at <= size:
                at = min(max(at, 0.0), size - 1)
                for i in (math.floor(at), math.ceil(at)):
                    share = 1 - abs(at - i)
                    result[p, i] += share / samples / (2 if at == i else 1)
    return result
