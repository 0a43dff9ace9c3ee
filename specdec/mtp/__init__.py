"""MTP layers: what a target was trained with to predict further ahead, and what transformers drops when it loads it."""

from specdec.mtp.checkpoint import NoMtpLayers
from specdec.mtp.head import MtpHead, MtpLayer
from specdec.mtp.loading import at_hand, load

__all__ = ["MtpHead", "MtpLayer", "NoMtpLayers", "at_hand", "load"]
