/** Draws a long list piece by piece, so that no piece holds up the reader's input. */

import { useEffect, useState } from 'preact/hooks';

/** The number of items to draw now, which soon is `wanted`. */
export function useGrowing(wanted: number, step: number): number {
  const [drawn, set] = useState(Math.min(step, wanted));
  useEffect(() => {
    if (drawn >= wanted) return;
    const timer = setTimeout(() => set(drawn + step));
    return () => clearTimeout(timer);
  }, [drawn, wanted]);
  return Math.min(drawn, wanted);
}
