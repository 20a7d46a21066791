"""The forward pass of a Mamba-2 language model over one planned step.

Source: Dao and Gu 2024, arXiv 2405.21060. Weights are plain tensors and every state stands in the
pool's slots; nothing is remembered from step to step. What a step does with which slot is the
plan's business, how the recurrence is computed the kernels' and the decode algorithm's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch
from ssmcore_kernels import Kernels, for_device
from torch.nn.functional import embedding

from ssmcore.errors import StepError
from ssmcore.models.config import Mamba2Config
from ssmcore.models.projection import packed, project
from ssmcore.models.weights import LayerWeights, ModelWeights, wide_dtype
from ssmcore.plan import PrefillPlan, StepPlan
from ssmcore.state import StatePool
from ssmcore.strategies import DecodeAlgorithm, DecodeInputs, MixerShape

# a tied head is kept twice, plain and packed, where it is at most this part of the weights
_TIED_HEAD_SHARE = 1 / 3


class Mamba2Model:
    """A model ready to run on one device.

    Args:
        config: sizes and switches.
        weights: all tensors, on one device.

    Attributes:
        dtype: of activations and weights; device: where they are.
    """

    def __init__(self, config: Mamba2Config, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._residual_dtype = wide_dtype(self.dtype) if config.residual_in_fp32 else self.dtype
        self._kernels: Kernels = for_device(self.device)
        if self.device.type == "cuda" and self.dtype == torch.float32:
            # same tokens need IEEE float32 products
            torch.backends.cuda.matmul.allow_tf32 = False

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.weights.nbytes

    def mixer_shape(self, state_dtype: str = "float32") -> MixerShape:
        """Sizes of a mixer and dtypes of its slots, for the state pool and the strategies."""
        config = self.config
        dtype = str(self.dtype).removeprefix("torch.")
        return MixerShape(
            heads=config.heads,
            headdim=config.headdim,
            dstate=config.dstate,
            groups=config.groups,
            d_conv=config.d_conv,
            activation_dtype=dtype,
            conv_dtype=dtype,
            state_dtype=state_dtype,
        )

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        plan: StepPlan,
        pool: StatePool,
        decode: DecodeAlgorithm,
    ) -> torch.Tensor:
        """Run one step through all layers and advance the slots that the plan names.

        Args:
            token_ids: (tokens,), int32 or int64: the decode rows' tokens, then the prefill rows'.
                Of decode rows one token each, padding rows included; with speculative tokens as
                `plan.decode.query_start_loc` says.
            plan: the step's plan, uploaded to this model's device.
            pool: states of all layers.
            decode: the algorithm that `plan` was made with.

        Returns:
            hidden: (tokens, d_model), the model's dtype, after the final norm. Nothing is read back
            from the device; a step of decode rows alone can be captured as a CUDA graph.

        Raises:
            StepError: not the number of tokens that the plan was made for.
        """
        _check_tokens(token_ids, plan)
        num_decode = len(token_ids) - plan.num_prefill_tokens
        longest = _longest_chunk(plan.prefill)
        kernels, eps = self._kernels, self.config.norm_eps
        mixed = embedding(token_ids, self.weights.embedding)
        residual: torch.Tensor | None = None
        for index, layer in enumerate(self.weights.layers):
            if residual is None:
                residual = mixed.to(self._residual_dtype)
                normed = kernels.rms_norm(residual, layer.norm, eps)
            else:
                normed, residual = kernels.add_rms_norm(mixed, residual, layer.norm, eps)
            mixed = self._mix(normed, layer, index, num_decode, longest, plan, pool, decode)
        final = self.weights.final_norm
        if residual is None:
            return kernels.rms_norm(mixed, final, eps)
        return kernels.add_rms_norm(mixed, residual, final, eps)[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token, (n, vocab_size), float32, for hidden: (n, d_model)."""
        return project(hidden, self._head, None).float()

    @cached_property
    def _head(self) -> torch.Tensor:
        """The head, packed if it may take that much more memory beside the embedding."""
        head = self.weights.head
        if head.is_mkldnn or head.nbytes > _TIED_HEAD_SHARE * self.weights.nbytes:
            return head
        return packed(head)

    def _mix(
        self,
        hidden: torch.Tensor,
        layer: LayerWeights,
        index: int,
        num_decode: int,
        longest: int,
        plan: StepPlan,
        pool: StatePool,
        decode: DecodeAlgorithm,
    ) -> torch.Tensor:
        """One mixer: hidden (tokens, d_model) to (tokens, d_model)."""
        config = self.config
        slots = pool.layer(index)
        projected = project(hidden, layer.in_proj, layer.in_proj_bias)
        z = projected[:, : config.d_inner]
        xbc = projected[:, config.d_inner : -config.heads]
        dt = projected[:, -config.heads :]
        outputs = []
        if plan.decode is not None:
            conv = self._kernels.causal_conv1d_update(
                xbc[:num_decode],
                layer.conv_weight,
                layer.conv_bias,
                conv_state=slots["conv"],
                read_slots=plan.decode.conv_read_slots,
                write_slots=plan.decode.write_slots,
                query_start_loc=plan.decode.query_start_loc,
            )
            inputs = self._inputs(conv, dt[:num_decode], layer)
            outputs.append(decode.update(inputs, slots, plan.decode))
        if plan.prefill is not None:
            outputs.append(
                self._prefill(
                    xbc[num_decode:], dt[num_decode:], layer, longest, plan.prefill, slots
                )
            )
        y = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        gated = self._kernels.gated_rms_norm(
            y.view(len(hidden), config.d_inner),
            z,
            layer.gate_norm,
            group_size=config.d_inner // config.groups,
            eps=config.norm_eps,
        )
        return project(gated, layer.out_proj, layer.out_proj_bias)

    def _prefill(
        self,
        xbc: torch.Tensor,
        dt: torch.Tensor,
        layer: LayerWeights,
        longest: int,
        plan: PrefillPlan,
        slots: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Convolution and recurrence of the prefill rows, y: (tokens, heads, headdim)."""
        conv = self._kernels.causal_conv1d_prefill(
            xbc,
            layer.conv_weight,
            layer.conv_bias,
            query_start_loc=plan.query_start_loc,
            conv_state=slots["conv"],
            read_slots=plan.conv_read_slots,
            has_initial_states=plan.has_initial_states,
            write_rows=plan.state_write_rows,
            write_ends=plan.state_write_ends,
            write_slots=plan.state_write_slots,
        )
        inputs = self._inputs(conv, dt, layer)
        return self._kernels.ssd_prefill(
            inputs.x,
            inputs.dt,
            inputs.A,
            inputs.B,
            inputs.C,
            D=inputs.D,
            dt_bias=inputs.dt_bias,
            dt_limit=inputs.dt_limit,
            cu_chunk_seqlens=plan.cu_seqlens,
            seq_idx=plan.seq_idx,
            state=slots["state"],
            read_slots=plan.state_read_slots,
            has_initial_states=plan.has_initial_states,
            write_chunks=plan.state_write_chunks,
            write_slots=plan.state_write_slots,
            max_chunk_len=longest,
        )

    def _inputs(self, conv: torch.Tensor, dt: torch.Tensor, layer: LayerWeights) -> DecodeInputs:
        """What the recurrence takes, as views of the convolution's output."""
        config = self.config
        tokens = len(conv)
        bc = conv[:, config.d_inner :].view(tokens, 2, config.groups, config.dstate)
        return DecodeInputs(
            x=conv[:, : config.d_inner].view(tokens, config.heads, config.headdim),
            dt=dt,
            A=layer.A,
            B=bc[:, 0],
            C=bc[:, 1],
            D=layer.D,
            dt_bias=layer.dt_bias,
            dt_limit=config.time_step_limit,
        )


def _check_tokens(token_ids: torch.Tensor, plan: StepPlan) -> None:
    """Refuse token ids that are not those of the plan; nothing is read from a device."""
    decode = plan.decode
    rows = 0 if decode is None else decode.num_rows
    exact = decode is None or decode.query_start_loc is None
    wanted = plan.num_prefill_tokens + (rows if exact or decode is None else decode.num_tokens)
    if token_ids.ndim != 1 or (len(token_ids) != wanted if exact else len(token_ids) < wanted):
        raise StepError(
            "length",
            f"token_ids has shape {tuple(token_ids.shape)}; this plan takes ({wanted},): one of"
            " each decode row, padding rows included, then the prefill rows' tokens",
        )


def _longest_chunk(plan: PrefillPlan | None) -> int:
    """Tokens of a step's longest chunk, from the host's side of the plan."""
    return 0 if plan is None else int(np.diff(plan.host["cu_seqlens"]).max())
