/** The model files of all machines: `GET /baton/models`, and orders about them. /openapi.json documents every field. */

import { useCallback, useEffect, useState } from 'preact/hooks';
import { call, whyFailed } from './endpoint';

export interface ModelOnDisk {
  name: string;
  quantization?: string;
  n_bytes: number;
  /** An estimate. */
  fits: boolean;
  in_use: boolean;
  files: { path: string; n_bytes: number; sha256?: string }[];
}

export interface Transfer {
  number: number;
  model: string;
  is_copy: boolean;
  state: 'preparing' | 'receiving' | 'done' | 'failed' | 'cancelled';
  done_bytes: number;
  total_bytes?: number;
  problem?: string;
}

export interface Folder {
  models: ModelOnDisk[];
  free_bytes?: number;
  transfer?: Transfer;
}

export interface MachineReport {
  machine: string;
  folder?: Folder;
  problem?: string;
}

export interface ClusterModels {
  machines: MachineReport[];
  /** The caller may change them. */
  may_change: boolean;
}

export type Order =
  | { action: 'copy'; model: string; from: string; to: string }
  | { action: 'pull' | 'delete'; model: string; on: string }
  | { action: 'cancel'; on: string };

/** A model, and the machines that have it. */
export interface SharedModel {
  name: string;
  quantization?: string;
  n_bytes: number;
  sha256?: string;
  n_files: number;
  on: { machine: string; fits: boolean; inUse: boolean }[];
}

/** The models of all machines by name. Two files of one name that differ are two models. */
export function sharedModels(machines: MachineReport[]): SharedModel[] {
  const all = new Map<string, SharedModel>();
  for (const { machine, folder } of machines) {
    for (const model of folder?.models ?? []) {
      const key = `${model.name} ${model.n_bytes}`;
      const known = all.get(key) ?? { name: model.name, n_bytes: model.n_bytes, n_files: model.files.length, on: [] };
      const sha256 = known.sha256 ?? model.files[0]?.sha256;
      all.set(key, {
        ...known,
        ...(model.quantization ? { quantization: model.quantization } : {}),
        ...(sha256 ? { sha256 } : {}),
        on: [...known.on, { machine, fits: model.fits, inUse: model.in_use }],
      });
    }
  }
  return [...all.values()].sort((a, b) => a.name.localeCompare(b.name));
}

export function isMoving(transfer: Transfer | undefined): boolean {
  return transfer?.state === 'preparing' || transfer?.state === 'receiving';
}

/** Each machine reads its folder for an answer. */
const PAUSE_MS = 3_000;
/** While bytes arrive. */
const SHORT_PAUSE_MS = 1_000;

/** The list as long as it is shown, how to read it now, and how to give an order: that returns true if it was taken. */
export function useClusterModels(isShown: boolean) {
  const [models, set] = useState<ClusterModels | null>(null);
  const [unread, setUnread] = useState<string | null>(null);
  const [refused, setRefused] = useState<string | null>(null);
  const [turn, next] = useState(0);
  const moves = models?.machines.some(({ folder }) => isMoving(folder?.transfer)) ?? false;
  useEffect(() => {
    if (!isShown) return;
    const stop = new AbortController();
    let timer: ReturnType<typeof setTimeout>;
    const read = async () => {
      try {
        set((await (await call('./baton/models', { signal: stop.signal })).json()) as ClusterModels);
        setUnread(null);
      } catch (error) {
        if (stop.signal.aborted) return;
        setUnread(whyFailed(error));
      }
      timer = setTimeout(() => next((before) => before + 1), moves ? SHORT_PAUSE_MS : PAUSE_MS);
    };
    if (document.hidden) timer = setTimeout(() => next((before) => before + 1), PAUSE_MS);
    else void read();
    return () => {
      stop.abort();
      clearTimeout(timer);
    };
  }, [isShown, turn]);
  const attempt = useCallback(async (path: string, body: unknown): Promise<boolean> => {
    try {
      await (await call(path, { body })).text();
      setRefused(null);
      next((before) => before + 1);
      return true;
    } catch (error) {
      setRefused(whyFailed(error));
      return false;
    }
  }, []);
  const order = useCallback((order: Order) => attempt('./baton/models', order), [attempt]);
  /** As Ollama's clients do it: a request without a prompt. */
  const setLoaded = useCallback((model: string, keepAlive: number | null) => attempt('./api/generate', { model, stream: false, ...(keepAlive === null ? {} : { keep_alive: keepAlive }) }), [attempt]);
  return { models, problem: refused ?? unread, order, setLoaded };
}
