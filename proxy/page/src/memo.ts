/** Draws a component again only if one of its properties is another object. */

import { Component, h } from 'preact';
import type { ComponentChildren, FunctionComponent } from 'preact';

export function memo<P extends object>(draw: FunctionComponent<P>): FunctionComponent<P> {
  class Memo extends Component<P> {
    override shouldComponentUpdate(next: Readonly<P>): boolean {
      const before = this.props as Record<string, unknown>;
      const now = next as Record<string, unknown>;
      return Object.keys({ ...before, ...now }).some((name) => before[name] !== now[name]);
    }
    override render(): ComponentChildren {
      return h(draw as never, this.props as never);
    }
  }
  return Memo as unknown as FunctionComponent<P>;
}
