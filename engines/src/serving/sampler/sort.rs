//! Sorts candidates by descending logits as libstdc++'s `std::sort` and `std::partial_sort` do, equal ones included: the token
//! that a draw chooses depends on their order. The names of the algorithms' parts are those of `bits/stl_algo.h` and
//! `bits/stl_heap.h`.

use std::ops::Range;

use super::candidate::Candidate;

/// Shorter ranges are left to the insertion sort.
const THRESHOLD: usize = 16;

/// `comp(a, b)`: a comes first.
#[inline]
fn comes_first(a: &Candidate, b: &Candidate) -> bool {
    a.logit > b.logit
}

/// `std::sort`.
pub(super) fn sort(all: &mut [Candidate]) {
    if all.len() < 2 {
        return;
    }
    introsort_loop(all, 0..all.len(), 2 * all.len().ilog2());
    let n_guarded = all.len().min(THRESHOLD);
    for at in 1..n_guarded {
        insert(all, at, true);
    }
    for at in n_guarded..all.len() {
        insert(all, at, false);
    }
}

/// `std::partial_sort`: the first `n` are the ones that come first, in their order.
pub(super) fn partial_sort(all: &mut [Candidate], n: usize) {
    if n == 0 {
        return;
    }
    let (heap, rest) = all.split_at_mut(n);
    make_heap(heap);
    for candidate in rest {
        if comes_first(candidate, &heap[0]) {
            let value = std::mem::replace(candidate, heap[0]);
            sink(heap, 0, value);
        }
    }
    sort_heap(heap);
}

fn introsort_loop(all: &mut [Candidate], range: Range<usize>, mut depth: u32) {
    let Range { start, mut end } = range;
    while end - start > THRESHOLD {
        if depth == 0 {
            return partial_sort(&mut all[start..end], end - start);
        }
        depth -= 1;
        let cut = unguarded_partition_pivot(all, start..end);
        introsort_loop(all, cut..end, depth);
        end = cut;
    }
}

fn unguarded_partition_pivot(all: &mut [Candidate], Range { start, end }: Range<usize>) -> usize {
    let middle = start + (end - start) / 2;
    let (a, b, c) = (start + 1, middle, end - 1);
    let first = |x: usize, y: usize| comes_first(&all[x], &all[y]);
    let median = match (first(a, b), first(b, c), first(a, c)) {
        (true, true, _) | (false, false, false) => b,
        (true, false, true) | (false, true, false) => c,
        (true, false, false) | (false, _, true) => a,
    };
    all.swap(start, median);
    let (mut low, mut high) = (start + 1, end);
    loop {
        while comes_first(&all[low], &all[start]) {
            low += 1;
        }
        high -= 1;
        while comes_first(&all[start], &all[high]) {
            high -= 1;
        }
        if low >= high {
            return low;
        }
        all.swap(low, high);
        low += 1;
    }
}

/// Moves the candidate at `at` to its place among those before it. `guarded`: it may be the first one.
fn insert(all: &mut [Candidate], at: usize, guarded: bool) {
    let value = all[at];
    if guarded && comes_first(&value, &all[0]) {
        all.copy_within(0..at, 1);
        all[0] = value;
        return;
    }
    let mut hole = at;
    while hole > 0 && comes_first(&value, &all[hole - 1]) {
        all[hole] = all[hole - 1];
        hole -= 1;
    }
    all[hole] = value;
}

/// `std::__make_heap`: the last in order is at the top.
pub(super) fn make_heap(heap: &mut [Candidate]) {
    for parent in (0..heap.len() / 2).rev() {
        sink(heap, parent, heap[parent]);
    }
}

/// `std::__sort_heap`.
pub(super) fn sort_heap(heap: &mut [Candidate]) {
    for last in (1..heap.len()).rev() {
        let value = heap[last];
        heap[last] = heap[0];
        sink(&mut heap[..last], 0, value);
    }
}

/// `std::__adjust_heap`: the hole sinks to a leaf, then `value` rises from there.
pub(super) fn sink(heap: &mut [Candidate], top: usize, value: Candidate) {
    let mut hole = top;
    while 2 * hole + 2 < heap.len() {
        let Range { start: left, end: right } = 2 * hole + 1..2 * hole + 2;
        let child = if comes_first(&heap[right], &heap[left]) { left } else { right };
        heap[hole] = heap[child];
        hole = child;
    }
    if 2 * hole + 2 == heap.len() {
        heap[hole] = heap[2 * hole + 1];
        hole = 2 * hole + 1;
    }
    while hole > top && comes_first(&heap[(hole - 1) / 2], &value) {
        heap[hole] = heap[(hole - 1) / 2];
        hole = (hole - 1) / 2;
    }
    heap[hole] = value;
}
