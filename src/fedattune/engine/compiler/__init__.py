"""Compile local steps: trace a step once, make it cheaper by passes, and replay it; docs/compiler.md explains how."""

from .compile import CompiledStep, Compiler
from .loops import StepBatches

__all__ = ["CompiledStep", "Compiler", "StepBatches"]
