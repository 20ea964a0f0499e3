/** The system message and the sampling of a chat. */

import type { Settings } from './turns';

const SAMPLE_TOOLS = `[{"type": "function", "function": {
  "name": "get_weather",
  "description": "The weather in a city",
  "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
}}]`;

interface NumberFieldProps {
  label: string;
  value: number | null;
  min: number;
  max: number;
  step?: number;
  /** What an empty field means. */
  empty: number | null;
  set: (value: number | null) => void;
}

function NumberField({ label, value, min, max, step = 1, empty, set }: NumberFieldProps) {
  const change = (text: string) => {
    const typed = Number(text);
    set(text === '' || !Number.isFinite(typed) ? empty : Math.min(max, Math.max(min, typed)));
  };
  return (
    <label>
      {label}
      <input type="number" min={min} max={max} step={step} value={value ?? ''} placeholder="default" onInput={(event) => change(event.currentTarget.value)} />
    </label>
  );
}

export function SettingsForm({ settings, set }: { settings: Settings; set: (settings: Settings) => void }) {
  return (
    <details class="settings">
      <summary>Settings</summary>
      <label for="system">System message</label>
      <textarea id="system" rows={2} value={settings.system} onInput={(event) => set({ ...settings, system: event.currentTarget.value })} />
      <div class="pair">
        <NumberField label="Most tokens" value={settings.maxTokens} min={1} max={100_000} empty={512} set={(value) => set({ ...settings, maxTokens: Math.round(value ?? 512) })} />
        <NumberField label="Temperature" value={settings.temperature} min={0} max={2} step={0.1} empty={0} set={(value) => set({ ...settings, temperature: value ?? 0 })} />
        <NumberField label="Top p" value={settings.topP} min={0.01} max={1} step={0.05} empty={null} set={(topP) => set({ ...settings, topP })} />
        <NumberField label="Seed" value={settings.seed} min={0} max={2 ** 31 - 1} empty={null} set={(seed) => set({ ...settings, seed: seed === null ? null : Math.round(seed) })} />
      </div>
      <label for="tools">Tools, as JSON. The model's calls are shown, and nothing runs them</label>
      <textarea id="tools" rows={4} value={settings.tools} placeholder={SAMPLE_TOOLS} onInput={(event) => set({ ...settings, tools: event.currentTarget.value })} />
      <button type="button" class="quiet" onClick={() => set({ ...settings, tools: settings.tools ? '' : SAMPLE_TOOLS })}>
        {settings.tools ? 'Remove the tools' : 'Add a sample tool'}
      </button>
    </details>
  );
}
