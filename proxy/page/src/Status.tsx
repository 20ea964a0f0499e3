/** A state: a dot, and always a word. */

import type { Life } from './state';
import { LIFE } from './words';

export function Status({ life, label = LIFE[life] }: { life: Life; label?: string }) {
  return (
    <span class={`status ${life}`}>
      <span class="dot" aria-hidden="true" />
      {label}
    </span>
  );
}
