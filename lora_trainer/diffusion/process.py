"""The noising process: how latents become noisy and what the model must predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lora_trainer.diffusion.timesteps import UNIFORM, Times

Prediction = Literal["epsilon", "v_prediction", "flow"]
USUAL_STEPS = 1000


class NoSnrError(ValueError):
    """A weighting reads the signal-to-noise ratio of a flow, which has none."""


@dataclass(frozen=True)
class Process:
    """Variance-preserving diffusion (DDPM, arXiv:2006.11239, eq. 4), or a rectified flow (arXiv:2209.03003).

    `alphas_cumprod` [T] is the share of signal left at each timestep: of its energy in diffusion, of its amplitude in
    a flow, which is a straight line from the latents to the noise. `times` is the distribution of training times; for a
    model folder, their shift is its scheduler's.
    """

    alphas_cumprod: Tensor
    prediction: Prediction
    times: Times = UNIFORM

    @property
    def timesteps(self) -> int:
        return len(self.alphas_cumprod)

    @property
    def description(self) -> str:
        """What the model's noise is, in one line."""
        first, last = (float(self.alphas_cumprod[place]) for place in (0, -1))
        shift = f", {self.times.shift}" if self.prediction == "flow" else ""
        return f"{self.prediction}, {self.timesteps} timesteps, signal {first:.6g} to {last:.6g}{shift}"

    def _scales(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """Signal and noise scales at t [B], shaped [B, 1, 1, 1] on the device of `like`."""
        alpha = self.alphas_cumprod.to(like.device, torch.float32)[t].view(-1, 1, 1, 1)
        if self.prediction == "flow":
            return alpha.to(like.dtype), (1.0 - alpha).to(like.dtype)
        return alpha.sqrt().to(like.dtype), (1.0 - alpha).sqrt().to(like.dtype)

    def add_noise(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """Latents [B, C, h, w] with noise of the same shape mixed in at t [B]."""
        signal, spread = self._scales(t, latents)
        return signal * latents + spread * noise

    def target(self, latents: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """What the model must predict [B, C, h, w]: the noise, or the velocity (arXiv:2202.00512, app. D; the flow's)."""
        if self.prediction == "epsilon":
            return noise
        if self.prediction == "flow":
            return noise - latents
        signal, spread = self._scales(t, latents)
        return signal * noise - spread * latents

    def parts(self, noisy: Tensor, prediction: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """Latents and noise [B, C, h, w] each, that `noisy` is made of by this prediction at t [B].

        Mixed again at an earlier timestep they are the next step of DDIM (arXiv:2010.02502, eq. 12, eta 0), or of
        Euler along a flow.
        """
        signal, spread = self._scales(t, noisy)
        if self.prediction == "epsilon":
            return (noisy - spread * prediction) / signal.clamp_min(1e-4), prediction
        if self.prediction == "flow":
            return noisy - spread * prediction, noisy + signal * prediction
        return signal * noisy - spread * prediction, signal * prediction + spread * noisy

    def snr(self, t: Tensor) -> Tensor:
        """Signal-to-noise ratio [B] at t [B]. Raises NoSnrError for a flow."""
        if self.prediction == "flow":
            raise NoSnrError("a flow has no signal-to-noise ratio")
        alpha = self.alphas_cumprod.to(t.device, torch.float32)[t]
        return alpha / (1.0 - alpha)


def scaled_linear_alphas(steps: int, beta_start: float, beta_end: float) -> Tensor:
    """Stable Diffusion's schedule: betas linear in their square roots. [steps], float32."""
    betas = torch.linspace(beta_start**0.5, beta_end**0.5, steps, dtype=torch.float32).square()
    return torch.cumprod(1.0 - betas, dim=0)


def linear_alphas(steps: int, beta_start: float, beta_end: float) -> Tensor:
    """DDPM's schedule: betas linear. [steps], float32."""
    return torch.cumprod(1.0 - torch.linspace(beta_start, beta_end, steps, dtype=torch.float32), dim=0)


def zero_terminal_alphas(alphas_cumprod: Tensor) -> Tensor:
    """The schedule shifted and stretched so that its last timestep holds no signal at all (arXiv:2305.08891, alg. 1).

    [T] -> [T]; the first value stays. Only a model that predicts velocity can be trained at
    signal 0: there the noise is the whole input, and predicting it teaches nothing.
    """
    signal = alphas_cumprod.sqrt()
    first, last = signal[0], signal[-1]
    return ((signal - last) * (first / (first - last))).square()


def flow_signal(steps: int) -> Tensor:
    """A rectified flow at evenly spaced times: nothing is left of the signal at the last. [steps], float32."""
    return 1.0 - torch.arange(1, steps + 1, dtype=torch.float32) / steps


def usual_process(prediction: Prediction) -> Process:
    """The process of published models, for measurements without a model folder."""
    flows = prediction == "flow"
    return Process(flow_signal(USUAL_STEPS) if flows else scaled_linear_alphas(USUAL_STEPS, 0.00085, 0.012), prediction)
