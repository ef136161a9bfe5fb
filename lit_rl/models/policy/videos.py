"""Videos for processors: which families can show them exactly, and how frames are handed over as they are.

Processors of transformers take a video for a file to sample from. Here its frames were chosen by whoever made the
data, so none is left out, and the time of each is what the row says: Qwen2.5-VL turns positions by it, Qwen3-VL and
SmolVLM write it out. Left to themselves, processors assume 24 frames a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lit_rl.errors import ConfigError, DataError
from lit_rl.videos import VideoRef, Visual


@dataclass(frozen=True)
class _Family:
    """The way in which the processor and the model of a family take videos."""

    timed: bool = False
    """The model gets the time of each frame."""
    stacked: bool = False
    """The processor stacks the videos of a prompt; SmolVLM's writes the longest one's number of frames for all."""
    unpadded: bool = False
    """The model has no mark for frames that only pad a shorter video of a batch."""
    apart: bool = False
    """The processor makes one input of frames and images, of which the frames stay."""


FAMILIES = {
    "internvl": _Family(stacked=True),
    "llava_onevision": _Family(stacked=True, unpadded=True),
    "qwen2_5_vl": _Family(timed=True),
    "qwen2_vl": _Family(),
    "qwen3_vl": _Family(timed=True),
    "smolvlm": _Family(timed=True, stacked=True, apart=True),
}
"""The families, by model type, whose videos were compared with what transformers makes of them."""


def need_equal_lengths(model_type: str) -> bool:
    """Tell whether videos of one pass have to have equally many frames."""
    return model_type in FAMILIES and FAMILIES[model_type].unpadded


def check_visuals(model_type: str, visuals: Sequence[Visual], where: str) -> None:
    """Refuse what a model cannot be shown exactly.

    Args:
        model_type: Of its config.
        visuals: Images and videos of a prompt.
        where: The row, for messages.

    Raises:
        ConfigError: there is a video, and the family shows none.
        DataError: the family cannot show these videos.
    """
    videos = [each for each in visuals if isinstance(each, VideoRef)]
    if not videos:
        return
    family = FAMILIES.get(model_type)
    if family is None:
        raise ConfigError(
            f"{where}: the row shows a video, and models of the type {model_type!r} are shown images alone. Set model= "
            f"to one of {', '.join(FAMILIES)}, or list the frames as images."
        )
    if family.timed and (untimed := next((video for video in videos if video.fps is None), None)):
        raise DataError(
            f"{where}: the video {untimed.name} does not say how many frames a second has, and this model "
            f'({model_type}) is told when each was. Say it: {{"frames": [...], "fps": 2.0}}.'
        )
    if family.stacked and len(counts := sorted({len(video.frames) for video in videos})) > 1:
        raise DataError(
            f"{where}: the row's videos have {' and '.join(map(str, counts))} frames, and the processor of this model "
            f"({model_type}) takes videos of one prompt where all have equally many. Take as many frames of each."
        )
    if family.apart and len(videos) < len(visuals):
        raise DataError(
            f"{where}: the row shows images and videos, and the processor of this model ({model_type}) takes one kind "
            "in a prompt. List the images as videos of one frame."
        )


def arguments(videos: Sequence[VideoRef], frames: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Return the arguments of a processor for the videos of one prompt; none where it shows no video.

    Args:
        videos: In the order in which they are shown.
        frames: Their pixels.
    """
    if not videos:
        return {}
    metadata = [
        {
            "total_num_frames": len(video.frames),
            "frames_indices": list(range(len(video.frames))),  # a list of its own: Qwen3-VL's processor adds to it
            "fps": video.fps,
        }
        for video in videos
    ]
    return {"videos": [list(frames)], "videos_kwargs": {"do_sample_frames": False, "video_metadata": metadata}}
