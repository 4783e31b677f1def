"""A small model of every family keepgrad knows; `FAMILIES` has them by name. A new family is a new line in one of the files."""

from .timm import FAMILIES as TIMM

FAMILIES = {**TIMM}
