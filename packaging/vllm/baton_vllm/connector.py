"""The KV connector. vLLM makes one in its scheduler and one in each worker.

The scheduler's part marks the requests that the node has sent and tells the workers, step by step, which blocks they have. The
part of the worker of rank 0 runs the node and tells it which layers are computed; the other ranks serve it their heads (ranks.py).
Nothing is loaded: vLLM only computes for others.

vLLM reports the layers with attention alone. Of a hybrid model, the linear layers before one of these are computed with it.
"""

import logging
import os
from dataclasses import dataclass, field, replace

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.distributed.parallel_state import get_tp_group, in_the_same_node_as
from vllm.v1.kv_cache_interface import MambaSpec

from . import identity
from .errors import NodeError, Unsupported, unavailable
from .handoffs import Handoffs
from .node import Node
from .options import read_options
from .prompts import VllmApi
from .ranks import Gathered, Meeting, RankServer, connect, ranks_with_heads
from .rows import FP8, CpuRows, DeviceRows, Rows, rope_order, state_reader
from .states import DeltaNet, States

log = logging.getLogger("vllm.baton")

PARAMETER = "baton_handoff"
# Ways to divide a model other than tensor parallelism.
ONE = ("pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size", "nnodes")


@dataclass
class Step:
    """What a step computes of a handoff's prompt."""

    handoff: str
    request: str
    computed: int
    scheduled: int
    # A list for each of vLLM's groups of layers.
    blocks: list


@dataclass
class Steps(KVConnectorMetadata):
    steps: list = field(default_factory=list)
    # Requests whose blocks are given to others now.
    preempted: list = field(default_factory=list)


class BatonConnector(KVConnectorBase_V1, SupportsHMA):
    """Makes this server a prefill node. See packaging/vllm/README.md for the options.

    `SupportsHMA`: vLLM keeps the layers of a hybrid model in several groups, each with blocks of its own.
    """

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        for name in ONE:
            if getattr(parallel, name) != 1:
                raise Unsupported(f"{name} is {getattr(parallel, name)}: only tensor_parallel_size may be above 1")
        if vllm_config.speculative_config is not None:
            raise Unsupported("speculative decoding: BatonConnector only serves prompts")
        self._options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        # The scheduler's part.
        self._requests = {}
        self._scheduled = set()
        # The worker's part.
        self._handoffs = None
        self._by_request, self._finished = {}, set()
        self._stepping = []

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config):
        # A graph of the whole model would not report its layers.
        return True

    # The scheduler

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        handoff = (request.kv_transfer_params or {}).get(PARAMETER)
        if isinstance(handoff, str):
            self._requests[request.request_id] = (handoff, [[] for _ in self._kv_cache_config.kv_cache_groups])
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        return

    def build_connector_meta(self, scheduler_output):
        meta = Steps()
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._add(meta, new.req_id, new.block_ids, new.num_computed_tokens, scheduled)
        cached = scheduler_output.scheduled_cached_reqs
        for request, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
            if request in cached.resumed_req_ids:
                # Its rows were lost with its blocks; the node has reported that and aborts it.
                self._requests.pop(request, None)
            self._add(meta, request, blocks, computed, scheduled)
        meta.preempted = [one for one in scheduler_output.preempted_req_ids or () if one in self._scheduled]
        return meta

    def _add(self, meta, request, new_blocks, computed, scheduled):
        if request in self._requests:
            handoff, blocks = self._requests[request]
            for known, new in zip(blocks, new_blocks or ()):
                known.extend(new)
            self._scheduled.add(request)
            meta.steps.append(Step(handoff, request, computed, scheduled[request], [list(known) for known in blocks]))

    def request_finished_all_groups(self, request, block_ids):
        return self.request_finished(request, block_ids)

    def request_finished(self, request, block_ids):
        """vLLM keeps the blocks until the worker has sent their rows."""
        self._requests.pop(request.request_id, None)
        if request.request_id in self._scheduled:
            self._scheduled.discard(request.request_id)
            return True, None
        return False, None

    # The worker

    def register_kv_caches(self, kv_caches):
        config, options = self._vllm_config, self._options
        folder = config.model_config.model
        changes = {"quantization": config.model_config.quantization, "kv_cache": config.cache_config.cache_dtype}
        model, layout, fingerprint = identity.of_folder(folder, options["kv_dtype"], changes)
        self._n_layers, self._has_states = layout.n_layers, bool(layout.linear)
        group = get_tp_group()
        rows, here = self._rows(kv_caches, model, layout)
        # The other ranks hear a moment later that a handoff is closed.
        self._handoffs = Handoffs(options["max_handoffs"] * (1 if group.rank_in_group == 0 else 2))
        gathered = self._meet(group, rows, layout, here, identity.linear_shape(model) if layout.linear else None)
        if gathered is None:
            return
        # All tensors are views of one allocation.
        limits = {"n_ctx": config.model_config.max_model_len, "n_slots": config.scheduler_config.max_num_seqs,
                  "kv_bytes": group.world_size * max(one.size for one in self._kv_cache_config.kv_cache_tensors)}
        device = torch.cuda.get_device_name() if self._is_device else "CPU"
        devices = [f"vLLM ({device})"] * group.world_size
        info = identity.describe(folder, model, layout, fingerprint, canary(folder), limits, devices)
        host, port = options["listen"]
        api = VllmApi(*options["vllm"], os.environ.get("VLLM_API_KEY"))
        node = Node(options["key"], layout, info, gathered, self._handoffs, api, options["overlap"])
        node.start(host, port, options["tls"])
        log.info("Baton: this server is a prefill node at %s:%d", host, port)

    def _rows(self, kv_caches, model, layout):
        """This rank's rows and states, and its own layout."""
        config, groups = self._vllm_config, self._kv_cache_config.kv_cache_groups
        layers = config.compilation_config.static_forward_context
        group_of = {name: number for number, group in enumerate(groups) for name in group.layer_names}
        is_linear = {name: isinstance(groups[number].kv_cache_spec, MambaSpec) for name, number in group_of.items()}
        names = layers_in_order([name for name in kv_caches if not is_linear[name]], layout.n_layers)
        linear = layers_in_order([name for name in kv_caches if is_linear[name]], len(layout.linear))
        caches = [kv_caches[name] for name in names]
        self._layer_numbers = {name: i for i, name in enumerate(names)}
        self._is_device = caches[0].device.type != "cpu"
        group_numbers = [group_of[name] for name in names]
        block_size = block_size_of([groups[number].kv_cache_spec for number in group_numbers], layout)
        # The groups without rows, which take blocks of the same pool, are left out: this is only shown.
        n_positions = self._kv_cache_config.num_blocks * block_size // len(set(group_numbers))
        stored = FP8.get(config.cache_config.cache_dtype)
        here = replace(layout, n_values=caches[0].shape[1] * caches[0].shape[3] // 2)
        attention = [layers[name] for name in names]
        source = rows_source(caches, attention, here, config, stored)
        scales = [(one._k_scale_float, one._v_scale_float) for one in attention]
        states = self._states(model, [layers[name].kv_cache for name in linear], [group_of[name] for name in linear])
        return Rows(source, here, block_size, n_positions, scales, stored, group_numbers, states), here

    def _states(self, model, caches, group_numbers):
        """This rank's states of the linear layers; `None`: there are none."""
        if not caches:
            return None
        if getattr(self._vllm_config.cache_config, "use_replayssm", False):
            raise Unsupported("--use-replayssm: a block has an older state than that of the last token")
        shape = identity.linear_shape(model).of_rank(get_tp_group().world_size)
        for convolution, recurrence in caches:
            shape.check(convolution.shape[1:], recurrence.shape[1:])
        block_size = self._kv_cache_config.kv_cache_groups[group_numbers[0]].kv_cache_spec.block_size
        is_transposed = not self._is_device and isinstance(shape, DeltaNet) and cpu_keeps_k_first(shape.size)
        return States(state_reader(caches), shape, group_numbers, block_size, is_transposed)

    def _meet(self, group, rows, layout, here, shape):
        """On rank 0: what gathers the rows of all ranks. On the others `None`: they serve theirs from here on."""
        rank, n_ranks = group.rank_in_group, group.world_size
        with_heads = ranks_with_heads(n_ranks, layout.n_values, here.n_values)
        if n_ranks == 1:
            return Gathered(rows, layout, shape=shape)
        if not all(in_the_same_node_as(group.cpu_group)):
            raise Unsupported("tensor parallelism over several machines: BatonConnector gathers heads within one")
        # Each rank has states, whichever have copies of the heads of rows.
        asked = range(n_ranks) if shape else with_heads
        if rank == 0:
            with Meeting() as meeting:
                group.broadcast_object(meeting.place)
                others = zip(meeting.wait(asked[1:]), (other in with_heads for other in asked[1:]))
                return Gathered(rows, layout, list(others), shape)
        place = group.broadcast_object()
        if rank in asked:
            RankServer(connect(place, rank), here, self._vllm_config.model_config.max_model_len, rows, self._handoffs).start()
        return None

    def handle_preemptions(self, kv_connector_metadata):
        for request in kv_connector_metadata.preempted:
            if handoff := self._handoff_of(request):
                handoff.fail(unavailable("vLLM needed the prompt's memory for another one"))

    def start_load_kv(self, forward_context, **kwargs):
        return

    def wait_for_layer_load(self, layer_name):
        return

    def bind_connector_metadata(self, connector_metadata):
        super().bind_connector_metadata(connector_metadata)
        self._stepping = []
        for step in connector_metadata.steps:
            handoff = self._handoffs.find(step.handoff)
            self._by_request[step.request] = handoff
            if handoff is None:
                continue
            # After the prompt vLLM may compute its own next token, which nobody wants.
            if step.computed < handoff.n_tokens:
                handoff.begin_step(step.computed, step.scheduled, step.blocks)
                self._stepping.append(handoff)
            elif self._has_states:
                # Its step overwrites the states, so a handoff that is not closed fails.
                handoff.fail(NodeError("internal", detail="vLLM went on before the states were sent"))

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        if self._stepping:
            n_layers, ready = self._layer_numbers[layer_name] + 1, self._device_event()
            for handoff in self._stepping:
                handoff.layer_done(n_layers, ready)
                if n_layers == self._n_layers:
                    handoff.note_computed()

    def wait_for_save(self):
        if self._stepping:
            ready = self._device_event()
            for handoff in self._stepping:
                handoff.end_step(self._n_layers, ready)
                handoff.note_computed()
            self._stepping = []

    def get_finished(self, finished_req_ids):
        """Of the requests that vLLM is done with: those whose rows are sent."""
        self._finished.update(one for one in finished_req_ids if one in self._by_request)
        sent = {one for one in self._finished if (handoff := self._by_request[one]) is None or handoff.closed}
        self._finished -= sent
        for request in sent:
            del self._by_request[request]
        return sent or None, None

    def shutdown(self):
        if self._handoffs is not None:
            self._handoffs.fail_all("vLLM stops")

    def _handoff_of(self, request):
        return self._by_request.get(request)

    def _device_event(self):
        if not self._is_device:
            return None
        event = torch.cuda.Event()
        event.record()
        return event


def block_size_of(specs, layout):
    """The positions of a block, of the layers with rows. Errors: vLLM frees rows that are sent."""
    for layer, spec in enumerate(specs):
        kept, sent = getattr(spec, "sliding_window", None), layout.window
        if kept is not None and (sent is None or layer not in sent.layers or kept < sent.n_positions):
            raise Unsupported(f"vLLM keeps the last {kept} positions of layer {layer}, and more are handed over")
    if len({spec.block_size for spec in specs}) != 1:
        raise Unsupported("vLLM's blocks have different sizes in different layers")
    return specs[0].block_size


def layers_in_order(names, n_layers):
    """The names of so many layers, lower layers first."""
    def number(name):
        return [int(part) for part in name.split(".") if part.isdigit()]

    if len(names) != n_layers:
        raise Unsupported(f"vLLM has {len(names)} caches for {n_layers} layers")
    return sorted(names, key=number)


def rows_source(caches, attention, layout, config, stored):
    order = rope_order(caches[0].shape[3] // 2, layout.rope)
    if caches[0].device.type != "cpu":
        return DeviceRows(caches, layout, order)
    store = cpu_store(config.model_config.dtype, attention[0].isa, config.cache_config.cache_dtype)
    return CpuRows(caches, layout, order, store, stored)


def cpu_store(dtype, isa, cache_dtype):
    """What writes K and V of the first positions into a cache, as vLLM's kernels for the processor do."""
    from vllm import _custom_ops

    def store(k, v, k_cache, v_cache):
        slots = torch.arange(k.shape[0], dtype=torch.int64)
        k, v = k.to(dtype).contiguous(), v.to(dtype).contiguous()
        _custom_ops.cpu_attn_reshape_and_cache(
            k, v, k_cache, v_cache, slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype=cache_dtype)

    return store


def cpu_keeps_k_first(size):
    """Whether vLLM's kernels for the processor keep the memory of a head as [K elements, V elements]: one token shows it."""
    from vllm import _custom_ops

    k, v = (torch.zeros((1, 1, 1, size), dtype=torch.bfloat16) for _ in range(2))
    k[..., 0], v[..., 1] = 1, 1
    memory = torch.zeros((1, 1, size, size))
    _custom_ops.chunk_gated_delta_rule_cpu(
        query=k, key=k, value=v, g=torch.zeros((1, 1, 1)), beta=torch.ones((1, 1, 1), dtype=torch.bfloat16),
        initial_state=memory, output_final_state=True, cu_seqlens=torch.tensor([0, 1], dtype=torch.int32), head_first=False,
        use_qk_l2norm_in_kernel=True, initial_state_indices=torch.zeros(1, dtype=torch.int32))
    place = divmod(int(memory[0, 0].abs().argmax()), size)
    if place not in ((0, 1), (1, 0)):
        raise Unsupported("the kernels of this processor keep states in an order that is not known")
    return place == (0, 1)


def canary(folder):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    return tokenizer.encode(identity.CANARY).ids[: identity.MAX_CANARY]
