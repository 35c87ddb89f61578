"""Trains the demo model from nothing, on scenes it draws itself, in about 25 minutes of one H200.

    python -m sdaccel.models.demo.train --out DIR

Five stages, each of which resumes where a stopped run left it (its state lies in DIR/state):

    vae       images to latents and back
    unet      text encoder and UNet together, on latents of several sizes
    pack      fp16 weights in the diffusers layout: DIR/weights
    lora      a small LoRA that draws blueprints: DIR/lora/blueprint.safetensors
    evaluate  held-out prompts through StableDiffusionPipeline, scored by sdaccel.quality: DIR/evaluation.json

`--limit` ends a run after so many seconds with its state saved; run it again to go on.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, StableDiffusionPipeline
from torch import Tensor, nn

from sdaccel.models.demo import architecture, held_out_prompts
from sdaccel.models.demo.draw import draw
from sdaccel.models.demo.scenes import empty_caption, random_caption, random_scene

STAGES = ("vae", "unet", "pack", "lora", "evaluate")
LATE = 0.65  # a stage's progress from which the larger canvases get their later share
PHRASINGS = 3  # captions kept for each scene


@dataclass(frozen=True)
class Canvas:
    """One image size: images a batch and in the pool, and the share of steps it gets, early and late in a stage."""

    height: int
    width: int
    batch: int
    pool: int
    share: tuple[float, float]
    compiled: bool = False


# Every batch has about as many pixels as any other, so every step costs about the same.
VAE_CANVASES = (
    Canvas(256, 256, 64, 12_000, (0.88, 0.80), compiled=True),
    Canvas(512, 512, 16, 1_600, (0.05, 0.08)),
    Canvas(1024, 1024, 4, 320, (0.03, 0.06)),
    Canvas(256, 384, 42, 1_600, (0.02, 0.03)),
    Canvas(384, 256, 42, 1_600, (0.02, 0.03)),
)
UNET_CANVASES = (
    Canvas(256, 256, 512, 40_000, (0.72, 0.48), compiled=True),
    Canvas(512, 512, 128, 8_000, (0.14, 0.26), compiled=True),
    Canvas(1024, 1024, 32, 1_600, (0.08, 0.18)),
    Canvas(256, 384, 320, 4_000, (0.03, 0.04)),
    Canvas(384, 256, 320, 4_000, (0.03, 0.04)),
)
LORA_CANVASES = (Canvas(256, 256, 256, 5_000, (1.0, 1.0)),)


class Run:
    """The options of one run, its clock, and the state that outlives it."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.out: Path = options.out
        self.folder: Path = options.state or options.out / "state"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.device = torch.device(options.device)
        self.started = time.monotonic()

    def left(self) -> float:
        return self.options.limit - (time.monotonic() - self.started)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def load(self, name: str) -> dict[str, Any]:
        path = self.folder / f"{name}.pt"
        return torch.load(path, map_location=self.device, weights_only=True) if path.exists() else {}

    def save(self, name: str, state: dict[str, Any]) -> None:
        path = self.folder / f"{name}.pt"
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def canvases(self, canvases: tuple[Canvas, ...]) -> tuple[Canvas, ...]:
        """Scaled by `--scale`, or four small images of each for a dry run."""
        if self.options.tiny:
            return tuple(replace(c, height=c.height // 4, width=c.width // 4, batch=2, pool=4) for c in canvases)
        scale = self.options.scale
        return tuple(replace(c, batch=math.ceil(c.batch * scale), pool=math.ceil(c.pool * scale)) for c in canvases)


# ---- the loop that all stages share ----


def optimise(
    run: Run,
    stage: str,
    canvases: tuple[Canvas, ...],
    parameters: list[nn.Parameter],
    loss: Callable[[Canvas], Tensor],
    state: dict[str, Any],
    save: Callable[[], None],
    *,
    rate: float,
    averages: list[Tensor] | None = None,
) -> bool:
    """AdamW with a cosine rate until the stage's seconds are used; False if the run's limit came first.

    `averages` follow `parameters` as exponential moving averages.
    """
    cuda = run.device.type == "cuda"
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.99), weight_decay=1e-3, fused=cuda)
    if "optimizer" in state:
        optimizer.load_state_dict(state["optimizer"])
    total, before = getattr(run.options, f"{stage}_seconds"), state.get("elapsed", 0.0)
    step = first = state.get("step", 0)
    rng = random.Random(run.options.seed + step)
    begun = saved = time.monotonic()
    fresh = set(canvases)
    while True:
        now = time.monotonic()
        elapsed = before + now - begun
        progress = min(1.0, elapsed / total)
        ending = progress >= 1.0 or run.left() < 10
        if ending or now - saved > 150:
            state |= {"step": step, "elapsed": elapsed, "optimizer": optimizer.state_dict()}
            save()
            saved = time.monotonic()
            run.say(f"{stage}: saved at step {step}, {elapsed:.0f} of {total:.0f} s")
            if ending:
                return progress >= 1.0
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 300) * (0.505 + 0.495 * math.cos(math.pi * progress))
        canvas = rng.choices(canvases, [c.share[progress >= LATE] for c in canvases])[0]
        with torch.autocast(run.device.type, torch.bfloat16):
            value = loss(canvas)
        value.backward()
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if averages is not None:
            with torch.no_grad():
                torch._foreach_lerp_(averages, parameters, 1 - min(0.9995, (1 + step) / (10 + step)))
        if canvas in fresh:
            fresh.remove(canvas)
            run.say(f"{stage}: a first step at {canvas.height}x{canvas.width}, loss {value.item():.4f}")
        if step % 250 == 0 or step in (25, 50, 100):
            run.say(
                f"{stage}: step {step}, {canvas.height}x{canvas.width}, loss {value.item():.5f}, gradient "
                f"{norm.item():.3f}, {(time.monotonic() - begun) / (step - first) * 1000:.1f} ms a step on average"
            )


def compiled(run: Run, module: nn.Module) -> Callable[..., Any]:
    return torch.compile(module, dynamic=False) if run.options.compile else module


# ---- VAE ----


class Reconstruction(nn.Module):
    """One pass through the VAE with sampled latents: (image, mean, log variance)."""

    def __init__(self, vae: AutoencoderKL):
        super().__init__()
        self.vae = vae

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.vae.quant_conv(self.vae.encoder(images)).chunk(2, dim=1)
        spread = spread.clamp(-30, 20)
        # A tenth of the latents' own deviation, so that the decoder forgives the diffusion's small errors.
        latents = mean + torch.randn_like(mean) * (0.01 + spread.exp()).sqrt()
        return self.vae.decoder(self.vae.post_quant_conv(latents)), mean, spread


def vae_loss(result: tuple[Tensor, Tensor, Tensor], images: Tensor) -> Tensor:
    """L1 on values and on edges; latents of mean 0 and deviation 1 in every channel; a faint KL term."""
    image, mean, spread = (part.float() for part in result)
    error = image - images
    edges = (error[..., 1:, :] - error[..., :-1, :]).abs().mean() + (error[..., 1:] - error[..., :-1]).abs().mean()
    centre, deviation = mean.mean((0, 2, 3)), mean.std((0, 2, 3))
    moments = centre.square().sum() + (deviation - 1).square().sum()
    divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).mean()
    return error.abs().mean() + 0.5 * edges + 0.02 * moments + 1e-6 * divergence


def train_vae(run: Run) -> bool:
    state = run.load("vae")
    vae = architecture.build_vae().to(run.device, memory_format=torch.channels_last)
    if state:
        vae.load_state_dict(state["model"])
    rng = random.Random(run.options.seed + state.get("step", 0))
    canvases = run.canvases(VAE_CANVASES)
    pools = {canvas: image_pool(run, canvas, rng) for canvas in canvases}
    run.say("vae: images drawn")
    eager = Reconstruction(vae)
    fast = compiled(run, eager)

    def loss(canvas: Canvas) -> Tensor:
        pool = pools[canvas]
        images = pool[torch.randint(len(pool), (canvas.batch,), device=run.device)]
        images = (images.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)
        return vae_loss((fast if canvas.compiled else eager)(images), images)

    def save() -> None:
        state["model"] = vae.state_dict()
        run.save("vae", state)

    if not optimise(run, "vae", canvases, list(vae.parameters()), loss, state, save, rate=1e-3):
        return False
    with torch.no_grad():
        for canvas in canvases:
            images = pools[canvas][: canvas.batch].float() / 127.5 - 1
            with torch.autocast(run.device.type, torch.bfloat16):
                latents = vae.encode(images).latent_dist.mean
                error = (vae.decode(latents).sample.float() - images).square().mean()
            run.say(
                f"vae: {canvas.height}x{canvas.width} PSNR {10 * math.log10(4 / error.item()):.1f} dB, latents "
                f"{latents.float().mean((0, 2, 3)).tolist()} ± {latents.float().std((0, 2, 3)).tolist()}"
            )
    return True


def image_pool(run: Run, canvas: Canvas, rng: random.Random) -> Tensor:
    """uint8 images, a fifth of them outlines, so that the VAE learns finer lines than filled shapes have."""
    parts = []
    for start in range(0, canvas.pool, 5 * canvas.batch):
        for style, count in (("plain", 4), ("outline", 1)):
            count = min(count * canvas.batch, canvas.pool - start)
            scenes = [random_scene(rng, aspect=canvas.width / canvas.height) for _ in range(count)]
            images = draw(scenes, canvas.height, canvas.width, style=style, device=run.device)
            parts.append(((images + 1) * 127.5).round().to(torch.uint8))
    return torch.cat(parts)


# ---- text encoder and UNet ----


@dataclass
class Latents:
    """Scenes as the UNet sees them: latents (N, 4, h, w) of deviation 1, captions (N, PHRASINGS, 77)."""

    latents: Tensor
    tokens: Tensor


@torch.no_grad()
def latent_pools(run: Run, stage: str, canvases: tuple[Canvas, ...], style: str) -> dict[Canvas, Latents]:
    """Encoded scenes and captions, drawn once and kept in the state folder."""
    kept = run.load(f"{stage}-pool")
    if not kept:
        vae, tokenizer = trained_vae(run), load_tokenizer(run)
        rng = random.Random(run.options.seed + 1)
        for canvas in canvases:
            scenes = [random_scene(rng, aspect=canvas.width / canvas.height) for _ in range(canvas.pool)]
            tokens = tokenize(tokenizer, [random_caption(scene, rng) for scene in scenes for _ in range(PHRASINGS)])
            size = max(1, canvas.batch // 2)
            parts = []
            for start in range(0, canvas.pool, size):
                images = draw(scenes[start : start + size], canvas.height, canvas.width, style=style, device=run.device)
                with torch.autocast(run.device.type, torch.bfloat16):
                    mean = vae.encode(images.contiguous(memory_format=torch.channels_last)).latent_dist.mean
                parts.append((mean.float() * vae.config.scaling_factor).half())
            kept[f"{canvas.height}x{canvas.width}"] = {
                "latents": torch.cat(parts),
                "tokens": tokens.view(canvas.pool, PHRASINGS, -1).to(run.device),
            }
            run.say(f"{stage}: {canvas.pool} scenes encoded at {canvas.height}x{canvas.width}")
        run.save(f"{stage}-pool", kept)
    return {canvas: Latents(**kept[f"{canvas.height}x{canvas.width}"]) for canvas in canvases}


def trained_vae(run: Run) -> AutoencoderKL:
    """The VAE in evaluation mode, with the scaling factor that gives its latents deviation 1."""
    vae = architecture.build_vae()
    vae.load_state_dict(run.load("vae")["model"])
    vae = vae.to(run.device, memory_format=torch.channels_last).eval().requires_grad_(False)
    rng = random.Random(run.options.seed + 2)
    side = 64 if run.options.tiny else 256
    with torch.no_grad():
        images = draw([random_scene(rng) for _ in range(4 if run.options.tiny else 256)], side, side, device=run.device)
        vae.register_to_config(scaling_factor=round(1 / vae.encode(images).latent_dist.mean.std().item(), 4))
    return vae


def load_tokenizer(run: Run):
    architecture.write_tokenizer(run.folder / "tokenizer")
    return architecture.load_tokenizer(run.folder / "tokenizer")


def tokenize(tokenizer, captions: list[str]) -> Tensor:
    """(N, 77), int32."""
    tokens = tokenizer(captions, padding="max_length", truncation=True, max_length=architecture.TOKENS)
    return torch.tensor(tokens.input_ids, dtype=torch.int32)


class Denoising:
    """The training loss of the UNet, shared with the LoRA's; timesteps from `least` to 999."""

    def __init__(
        self, run: Run, pools: dict[Canvas, Latents], unet: nn.Module, text_encoder: nn.Module, least: int = 0
    ):
        self.pools, self.device, self.text_encoder, self.least = pools, run.device, text_encoder, least
        self.eager, self.fast = unet, compiled(run, unet)
        self.kept = architecture.build_scheduler().alphas_cumprod.to(run.device)
        rng = random.Random(run.options.seed + 3)
        empty = [empty_caption(rng) for _ in range(2000)]
        self.empty = tokenize(load_tokenizer(run), empty).to(run.device)

    def __call__(self, canvas: Canvas) -> Tensor:
        pool, batch = self.pools[canvas], canvas.batch
        rows = torch.randint(len(pool.latents), (batch,), device=self.device)
        tokens = pool.tokens[rows, torch.randint(PHRASINGS, (batch,), device=self.device)]
        unnamed = self.empty[torch.randint(len(self.empty), (batch,), device=self.device)]
        tokens = torch.where(torch.rand(batch, 1, device=self.device) < 0.1, unnamed, tokens)
        latents = pool.latents[rows].float()
        # Larger latents show their layout through more noise, so that is where they need the practice.
        power = 1 + math.log2(latents[0, 0].numel() / 512) / 5
        shares = torch.rand(batch, device=self.device) ** (1 / power)
        times = (self.least + (1000 - self.least) * shares).long().clamp_max(999)
        kept = self.kept[times].view(-1, 1, 1, 1)
        noise = coloured_noise(latents)
        noisy = kept.sqrt() * latents + (1 - kept).sqrt() * noise
        words = self.text_encoder(input_ids=tokens.long()).last_hidden_state
        unet = self.fast if canvas.compiled else self.eager
        noisy = noisy.contiguous(memory_format=torch.channels_last)
        found = unet(noisy, times, words, return_dict=False)[0].float()
        # Near 1 / ᾱ, the weight that an error has in the image; without it, layout and colour are learnt last.
        weight = 1 / (kept + 0.05)
        return (weight * (found - noise).square()).mean() / weight.mean()


def coloured_noise(latents: Tensor) -> Tensor:
    """Gaussian noise with a random amount of very low frequencies added.

    The last timestep still holds a little of the image, and averages over many pixels would give its layout and its
    background away (the more, the larger the canvas), though sampling starts from noise that knows neither.
    """
    n, channels, height, width = latents.shape
    noise = torch.randn_like(latents)
    flat = torch.randn(n, channels, 1, 1, device=latents.device) * torch.rand(n, 1, 1, 1, device=latents.device)
    noise += 0.12 * flat
    excess = max(0.0, math.log2(min(height, width) / 32))
    if excess:
        cells = torch.randn(n, channels, 8, 8, device=latents.device) * torch.rand(n, 1, 1, 1, device=latents.device)
        noise += 0.12 * excess * F.interpolate(cells, (height, width), mode="bilinear")
    return noise


def train_unet(run: Run) -> bool:
    state = run.load("unet")
    canvases = run.canvases(UNET_CANVASES)
    pools = latent_pools(run, "unet", canvases, "plain")
    torch.manual_seed(run.options.seed)
    unet = architecture.build_unet().to(run.device, memory_format=torch.channels_last)
    text_encoder = architecture.build_text_encoder(len(load_tokenizer(run))).to(run.device)
    both = nn.ModuleDict({"unet": unet, "text_encoder": text_encoder})
    if state:
        both.load_state_dict(state["model"])
    parameters = list(both.parameters())
    averages = [p.detach().clone() for p in parameters]
    if state:
        torch._foreach_copy_(averages, list(state["average"].values()))
    names = [name for name, _ in both.named_parameters()]

    def save() -> None:
        state["model"], state["average"] = both.state_dict(), dict(zip(names, averages, strict=True))
        run.save("unet", state)

    torch.manual_seed(run.options.seed + state.get("step", 0))
    loss = Denoising(run, pools, unet, text_encoder)
    return optimise(run, "unet", canvases, parameters, loss, state, save, rate=1e-3, averages=averages)


def averaged(run: Run) -> nn.ModuleDict:
    """UNet and text encoder with the averaged weights."""
    unet, text_encoder = architecture.build_unet(), architecture.build_text_encoder(len(load_tokenizer(run)))
    both = nn.ModuleDict({"unet": unet, "text_encoder": text_encoder})
    both.load_state_dict(run.load("unet")["average"], strict=False)
    return both.eval().requires_grad_(False)


def pack(run: Run) -> bool:
    both = averaged(run)
    architecture.save_pipeline(
        run.out / "weights", trained_vae(run), both["text_encoder"], both["unet"], load_tokenizer(run)
    )
    size = sum(path.stat().st_size for path in (run.out / "weights").rglob("*") if path.is_file())
    run.say(f"pack: {size:,} bytes")
    return True


# ---- LoRA ----


def train_lora(run: Run) -> bool:
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict

    state = run.load("lora")
    canvases = run.canvases(LORA_CANVASES)
    pools = latent_pools(run, "lora", canvases, "blueprint")
    both = averaged(run).to(run.device)
    unet = both["unet"].to(memory_format=torch.channels_last)
    torch.manual_seed(run.options.seed)
    unet.add_adapter(
        LoraConfig(
            r=8, lora_alpha=16, init_lora_weights="gaussian", target_modules=["to_q", "to_k", "to_v", "to_out.0"]
        )
    )
    if state:
        set_peft_model_state_dict(unet, state["model"])
    parameters = [p for p in unet.parameters() if p.requires_grad]

    def save() -> None:
        state["model"] = get_peft_model_state_dict(unet)
        run.save("lora", state)
        # The file holds no alpha and is applied with scale 1, so alpha / r goes into B.
        layers = {
            name: (value * (2 if ".lora_B." in name else 1)).half().cpu().contiguous()
            for name, value in state["model"].items()
        }
        StableDiffusionPipeline.save_lora_weights(
            run.out / "lora", unet_lora_layers=layers, weight_name="blueprint.safetensors"
        )

    # Colours are settled early in sampling; at the later timesteps the latents already show them.
    loss = Denoising(run, pools, unet, both["text_encoder"], least=500)
    return optimise(run, "lora", canvases, parameters, loss, state, save, rate=4e-3)


# ---- evaluation ----


def evaluate(run: Run) -> bool:
    """Scores held-out prompts at three sizes, and the LoRA; guidance and steps as `--guidance` and `--steps` say."""
    from PIL import Image

    from sdaccel.quality import prompt_accuracy

    options = run.options
    half = torch.float16 if run.device.type == "cuda" else torch.float32
    pipe = StableDiffusionPipeline.from_pretrained(run.out / "weights", torch_dtype=half).to(run.device)
    pipe.set_progress_bar_config(disable=True)
    report: dict[str, Any] = {"device": _device_name(run.device), "steps": options.steps}

    def score(label: str, prompts: list[str], side: int, guidance: float, style: str = "plain") -> None:
        images = []
        size = max(1, 64 * 256**2 // side**2) if run.device.type == "cuda" else 4
        for start in range(0, len(prompts), size):
            generator = torch.Generator("cpu").manual_seed(options.seed + start)
            images += pipe(
                prompts[start : start + size],
                height=side,
                width=side,
                num_inference_steps=options.steps,
                guidance_scale=guidance,
                generator=generator,
            ).images
        accuracy = prompt_accuracy(images, prompts, style=style)
        report[label] = {"overall": accuracy.overall, "prompts": accuracy.total, **accuracy.attributes}
        shown = ", ".join(f"{name} {share:.1%}" for name, share in accuracy.attributes.items())
        run.say(f"evaluate: {label}: {accuracy.overall:.1%} of {accuracy.total} prompts; {shown}")
        for prompt, reasons in accuracy.failures[:8]:
            run.say(f"    {prompt}: {'; '.join(reasons)}")
        thumbs = [image.resize((192, 192)) for image in images[:12]]
        sheet = Image.new("RGB", (6 * 192, 2 * 192))
        for number, thumb in enumerate(thumbs):
            sheet.paste(thumb, (192 * (number % 6), 192 * (number // 6)))
        sheet.save(run.out / f"{label.replace(' ', '-').replace('.', '_')}.png")

    prompts = held_out_prompts(options.prompts, seed=options.seed)
    few = held_out_prompts(min(24, options.prompts), seed=options.seed + 1)
    for guidance in options.guidance:
        score(f"256 guidance {guidance}", prompts, 256, guidance)
    for side in (512, 1024) if not options.tiny else ():
        score(f"{side} guidance {options.guidance[0]}", few, side, options.guidance[0])
    lora = run.out / "lora" / "blueprint.safetensors"
    if lora.exists():
        score("256 without the LoRA, blueprints wanted", prompts[:64], 256, options.guidance[0], style="blueprint")
        pipe.load_lora_weights(lora.parent, weight_name=lora.name)
        score("256 with the LoRA, blueprints wanted", prompts[:64], 256, options.guidance[0], style="blueprint")
    (run.out / "evaluation.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return True


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sdaccel.models.demo.train", description="Trains the demo model.")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights/, lora/ and evaluation.json")
    parser.add_argument("--state", type=Path, help="folder for what a later run resumes from (default: OUT/state)")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which this run stops and saves")
    parser.add_argument("--vae-seconds", type=float, default=240)
    parser.add_argument("--unet-seconds", type=float, default=900)
    parser.add_argument("--lora-seconds", type=float, default=70)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20, help="sampling steps of the evaluation")
    parser.add_argument("--prompts", type=int, default=240, help="held-out prompts of the evaluation")
    parser.add_argument("--guidance", type=float, nargs="+", default=[5.0])
    parser.add_argument("--scale", type=float, default=1.0, help="of batches and pools; 0.05 suits a CPU")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--tiny", action="store_true", help="a dry run on a few small images")
    run = Run(parser.parse_args(arguments))
    if run.device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    stages = {"vae": train_vae, "unet": train_unet, "pack": pack, "lora": train_lora, "evaluate": evaluate}
    for stage in run.options.stages:
        if run.load(stage).get("elapsed", 0) >= getattr(run.options, f"{stage}_seconds", math.inf):
            run.say(f"{stage}: done before")
        elif not stages[stage](run):
            run.say(f"{stage}: stopped by --limit; run again to go on")
            return


if __name__ == "__main__":
    main()
