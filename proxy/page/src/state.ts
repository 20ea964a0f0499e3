/** The data of `/baton/state`, as far as the page shows it. /openapi.json documents every field. Times in milliseconds. */

export type Life = 'unloaded' | 'starting' | 'ready' | 'draining' | 'suspect' | 'down' | 'asleep' | 'waking';

export interface Breaker {
  is_open: boolean;
  last_reason: string | null;
}

export interface RatePoint {
  size: number;
  tokens_per_second: number;
}

export interface NodeReport {
  name: string;
  task: 'prefill' | 'decode';
  life: Life;
  reason?: string;
  life_since_ms: number;
  has_answered: boolean;
  /** Why no model uses it for this task although it answers, and what to do. */
  unused?: string;
  /** Why this model does not use it, in one word. */
  unused_reason?: string;
  address?: string;
  engine: string;
  /** Its figures are a simulation's. */
  simulated: boolean;
  /** The endpoint itself started it. */
  own: boolean;
  /** What its configuration sets, if the endpoint started it. */
  options?: Record<string, unknown>;
  devices?: string[];
  /** Those that compute a part of its layers. */
  workers?: { name: string; devices: string[]; layers: number }[];
  model: string;
  n_ctx: number;
  slots: number;
  active_slots: number;
  queued: number;
  prefill_backlog_tokens: number;
  free_kv_cells: number;
  /** 0 if the node does not say. */
  kv_cells: number;
  memory_bytes: number;
  breaker: Breaker;
  prefill_rates: RatePoint[];
  decode_rates: RatePoint[];
}

export interface Link {
  prefill: string;
  decode: string;
  bytes_per_second: number;
  rtt_ms: number;
  same_weights?: boolean;
  kv_distance?: number;
  unused_reason?: string;
  breaker: Breaker;
}

export interface Fallback {
  count: number;
  last_ms: number;
}

/** A model that is loaded on demand. */
export interface Residency {
  life: string;
  bytes: number;
  measured_bytes: number;
  active: number;
  waiting: number;
  /** Missing if it stays. */
  expires_at_ms?: number;
  last_failure?: string;
}

export interface Model {
  name: string;
  aliases: string[];
  policy: string;
  nodes: NodeReport[];
  links: Link[];
  fallbacks: Record<string, Fallback>;
  kv_returns?: { returned: number; gave_way: number; failed: number; tokens: number };
  prediction_error: number;
  residency?: Residency;
}

/** What the replies of an upstream have shown of one of its models. */
export interface MeasuredModel {
  model: string;
  replies: number;
  constant_ms: number;
  prefill_rates: RatePoint[];
  decode_rates: RatePoint[];
}

export interface Upstream {
  name: string;
  kind: string;
  life: Life;
  reason?: string;
  address?: string;
  models: string[];
  measured?: MeasuredModel[];
  running: number;
  waiting: number;
  limit: number;
  busy_ms: number;
  breaker: Breaker;
}

export interface Handoff {
  n_tokens: number;
  n_cached: number;
  n_computed: number;
  n_bytes: number;
  queue_ms: number;
  prefill_ms: number;
  transfer_ms: number;
  import_ms: number;
  after_prefill_ms: number;
  during_prefill_ms: number;
  total_ms: number;
  failure?: string;
}

/** What a prefill server of an upstream did. */
export interface UpstreamPrefill {
  prefill_ms: number;
  n_transferred: number;
}

/** The tokens of a prompt, by the source of their KV. */
export interface TokenSources {
  slot: number;
  memory: number;
  disk: number;
  pulled: number;
  computed: number;
}

export interface Prediction {
  queue_ms: number;
  restore_ms?: number;
  prefill_ms: number;
  wire_ms: number;
  after_prefill_ms: number;
  step_ms: number;
  ttft_ms: number;
  completion_ms: number;
}

/** The predicted times of one machine alone, from the plan on. */
export interface DirectPrediction {
  node: string;
  ttft_ms: number;
  step_ms: number;
}

export type Outcome = 'done' | 'cancelled' | 'failed' | 'refused';

/** A request: one that has not ended has no outcome, and `decode` is empty until it has a route. */
export interface Request {
  at_ms: number;
  request_id: string;
  model: string;
  decode: string;
  prefill: string | null;
  policy: string;
  reason: string;
  n_prompt: number;
  n_cached: number;
  sources?: TokenSources;
  restore_ms?: number;
  n_completion: number;
  /** Guessed tokens that were verified; missing if there were none. */
  drafts?: { n: number; n_accepted: number };
  /** Vectors or scores; a request for text has none. */
  n_vectors?: number;
  admitted_ms: number | null;
  before_plan_ms: number;
  slot_ms: number | null;
  /** Since when it waits: no engine works for it. */
  waiting_since_ms?: number;
  /** Since when an engine works for it. */
  running_since_ms?: number;
  predicted: Prediction | null;
  predicted_direct_ttft_ms: number | null;
  /** Of the machine that alone was predicted to be done first. */
  predicted_direct?: DirectPrediction;
  /** How much earlier it was done than `predicted_direct` says; negative: later. Of handoffs that are complete. */
  saved_ms?: number;
  ttft_ms: number | null;
  e2e_ms: number;
  handoff: Handoff | null;
  upstream_prefill?: UpstreamPrefill;
  /** A node of its route is simulated, and so are its times. */
  simulated?: boolean;
  /** Where the reply went on after its first token. */
  moved_to?: string;
  outcome: Outcome | null;
  error?: string;
}

/** Something that announces itself as a node. */
export interface Found {
  name: string;
  state: string;
  reason: string;
  role?: string;
  addresses?: { address: string; state: string }[];
}

/** What was found in the network. */
export interface Discovery {
  problem?: string;
  found: Found[];
}

export interface Percentiles {
  p50: number;
  p95: number;
  p99: number;
}

export interface Sample {
  at_ms: number;
  seconds: number;
  running: number;
  waiting: number;
  ended: number;
  failed: number;
  generated_tokens: number;
  accepted_tokens?: number;
  prompt_tokens: number;
  cached_tokens: number;
  memory_tokens?: number;
  disk_tokens?: number;
  handoff_tokens: number;
  /** Handoffs that are compared with one machine alone, and what they saved together. */
  compared?: number;
  saved_ms?: number;
  first_token_ms: Percentiles | null;
  itl_ms: Percentiles | null;
  fallbacks?: Record<string, number>;
}

export interface RequestCounts {
  running: number;
  slots: number;
  limit: number;
  waiting: number;
}

export interface State {
  at_ms: number;
  version: string;
  is_stopping: boolean;
  requests: RequestCounts;
  models: Model[];
  upstreams: Upstream[];
  discovery: Discovery | null;
  memory_budget_bytes: number;
  open: Request[];
  routes: Request[];
  warnings: string[];
  history: Sample[];
}

/** An event of `/baton/state?stream=changes`. */
export type Changes = Partial<State> & { at_ms: number };

/** As many as the endpoint keeps. */
const MAX_SERVED = 64;
const MAX_UNSERVED = 16;
const MAX_SAMPLES = 360;

/** The endpoint lists no more requests that have not ended. */
export const MAX_OPEN = 128;

/** It runs, or had a route and was not refused there. */
function isServed({ outcome, decode }: Request): boolean {
  return outcome === null || (outcome !== 'refused' && decode !== '');
}

/** The first requests of both kinds. */
export function firstOf(requests: Request[], [served, others]: [number, number]): Request[] {
  let n_served = 0;
  let n_others = 0;
  return requests.filter((request) => (isServed(request) ? ++n_served <= served : ++n_others <= others));
}

/** The state after an event. Unchanged parts stay the same objects, so what shows them need not be drawn again. */
export function after(state: State, changes: Changes): State {
  const routes = changes.routes ? firstOf([...changes.routes, ...state.routes], [MAX_SERVED, MAX_UNSERVED]) : state.routes;
  const history = changes.history ? [...state.history, ...changes.history].slice(-MAX_SAMPLES) : state.history;
  return { ...state, ...changes, routes, history };
}

export const NOTHING: State = {
  at_ms: 0,
  version: '',
  is_stopping: false,
  requests: { running: 0, slots: 0, limit: 0, waiting: 0 },
  models: [],
  upstreams: [],
  discovery: null,
  memory_budget_bytes: 0,
  open: [],
  routes: [],
  warnings: [],
  history: [],
};
