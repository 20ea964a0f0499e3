/** A table that scrolls sideways in a box of its own, so that the page never does. */

import type { ComponentChildren } from 'preact';

export function WideTable({ label, kind, columns, children }: { label: string; kind?: string; columns: string[]; children: ComponentChildren }) {
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label={label}>
      <table class={kind ? `plan ${kind}` : 'plan'}>
        <thead>
          <tr>
            {columns.map((column) => (
              <th key={column} scope="col">
                {column}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}
