//! Tests the rules for every eviction order, and the promises of the default one.
//! With the default, a loop larger than memory costs little more than it must. A scan does not wash
//! out a working set, and a new phase takes over from an old one.

use hecaton_policy::evict::{self, Installed, MAX_BYTES_PER_PAGE};
use hecaton_policy::replay::{Outcome, Program, replay, trace::Reference};
use proptest::prelude::*;
use std::collections::HashSet;

fn program(pages: impl IntoIterator<Item = u64>) -> Program {
    let trace: Vec<_> = pages.into_iter().map(|page| Reference::new(page, false)).collect();
    Program::new("synthetic", &trace)
}

fn run(program: &Program, capacity: usize) -> Outcome {
    replay(program, capacity, evict::default().as_mut(), None)
}

/// A repeatable stream of numbers below `bound`.
fn draws(seed: u64, bound: u64) -> impl Iterator<Item = u64> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % bound
    })
}

#[test]
fn a_cyclic_sweep_over_twice_the_memory_hits_on_nearly_half() {
    let (capacity, pages, rounds) = (4000, 8000u64, 20);
    let sweep = program((0..rounds).flat_map(|_| 0..pages));
    let again = (rounds - 1) * pages;
    let optimum = sweep.optimal_refetches(capacity);
    assert!(optimum.abs_diff(again / 2) < again / 50, "{optimum}");
    let outcome = run(&sweep, capacity);
    assert!(outcome.refetches < again * 60 / 100, "{outcome:?} of {again}");
}

#[test]
fn a_cyclic_sweep_over_a_little_more_than_memory_does_not_thrash() {
    let (capacity, pages, rounds) = (4000, 4800u64, 20);
    let outcome = run(&program((0..rounds).flat_map(|_| 0..pages)), capacity);
    let again = (rounds - 1) * pages;
    assert!(outcome.refetches < again * 35 / 100, "{outcome:?} of {again}");
}

#[test]
fn a_scan_does_not_wash_out_a_working_set() {
    let capacity = 4000;
    // A working set of three quarters of memory, first alone, then beside a scan of never-used
    // pages that is ten times as large as memory.
    let mut hot = draws(1, 3000);
    let mut pages: Vec<u64> = hot.by_ref().take(60_000).collect();
    let scan_from = 1 << 20;
    for step in 0..40_000 {
        pages.extend([scan_from + step, hot.next().unwrap()]);
    }
    let outcome = run(&program(pages), capacity);
    // FIFO misses on more than 25,000 of the 40,000 references.
    assert!(outcome.refetches < 12_000, "{outcome:?}");
}

#[test]
fn a_new_phase_takes_over() {
    let capacity = 4000;
    let (first, second) = (draws(1, 3500), draws(2, 3500).map(|page| (1 << 20) + page));
    let phases = program(first.take(100_000).chain(second.take(100_000)));
    let outcome = run(&phases, capacity);
    assert!(outcome.refetches < 20_000, "{outcome:?}");
}

#[test]
fn a_new_phase_takes_over_from_a_loop() {
    let capacity = 4000;
    let sweep = (0..10).flat_map(|_| 0..8000u64);
    let second = draws(2, 3500).map(|page| (1 << 20) + page);
    let outcome = run(&program(sweep.chain(second.take(100_000))), capacity);
    assert!(outcome.refetches < 9 * 8000 * 60 / 100 + 20_000, "{outcome:?}");
}

#[test]
fn local_memory_is_never_exceeded() {
    let loaded = program(draws(3, 5000).take(50_000));
    for mut order in evict::all(1000) {
        let outcome = replay(&loaded, 1000, order.as_mut(), None);
        assert!(outcome.peak_local_pages <= 1000, "{}: {outcome:?}", order.name());
    }
}

#[derive(Clone, Debug)]
enum Step {
    Install(u32, Installed),
    Write(u32),
    Remove(u32),
    Evict(usize),
}

fn any_install() -> impl Strategy<Value = Installed> {
    prop_oneof![
        Just(Installed::Demand),
        Just(Installed::Prefetched),
        Just(Installed::Rescued),
        Just(Installed::ZeroFill),
        (0u64..500).prop_map(|distance| Installed::Refault { distance }),
        (0u64..500).prop_map(|distance| Installed::PrefetchedAgain { distance }),
    ]
}

fn any_step() -> impl Strategy<Value = Step> {
    let page = || 0u32..400;
    prop_oneof![
        6 => (page(), any_install()).prop_map(|(page, how)| Step::Install(page, how)),
        1 => page().prop_map(Step::Write),
        2 => page().prop_map(Step::Remove),
        2 => (0usize..40).prop_map(Step::Evict),
    ]
}

proptest! {
    /// An order returns exactly the pages that are in it, each once, and ends empty.
    #[test]
    fn victims_are_resident_pages_each_once(steps in prop::collection::vec(any_step(), 0..3000)) {
        for mut order in evict::all(200) {
            let mut resident = HashSet::new();
            let mut victims = Vec::new();
            for step in &steps {
                match *step {
                    Step::Install(page, how) => {
                        if resident.insert(page) {
                            order.installed(page, how);
                        }
                    }
                    Step::Write(page) => {
                        if resident.contains(&page) {
                            order.referenced(page);
                        }
                    }
                    Step::Remove(page) => {
                        if resident.remove(&page) {
                            order.removed(page);
                        }
                    }
                    Step::Evict(n) => {
                        order.victims(n, &mut |_| true, &mut victims);
                        prop_assert!(victims.len() == n.min(resident.len()), "{}", order.name());
                        for page in victims.drain(..) {
                            prop_assert!(resident.remove(&page), "{}: {page}", order.name());
                        }
                    }
                }
                prop_assert_eq!(order.len(), resident.len(), "{}", order.name());
            }
            order.victims(usize::MAX, &mut |_| true, &mut victims);
            prop_assert_eq!(victims.len(), resident.len(), "{}", order.name());
            prop_assert!(order.is_empty());
        }
    }

    /// A page that the caller says is gone is dropped, not returned.
    #[test]
    fn still_decides(gone in prop::collection::hash_set(0u32..100, 0..100)) {
        for mut order in evict::all(100) {
            (0..100).for_each(|page| order.installed(page, Installed::Demand));
            let mut victims = Vec::new();
            order.victims(100, &mut |page| !gone.contains(&page), &mut victims);
            prop_assert_eq!(victims.len() + gone.len(), 100, "{}", order.name());
            prop_assert!(victims.iter().all(|page| !gone.contains(page)));
            prop_assert!(order.is_empty());
        }
    }
}

/// No order grows when a program maps and unmaps the same memory for ever.
#[test]
fn memory_stays_bounded_under_unmapping() {
    let capacity = 10_000;
    for mut order in evict::all(capacity) {
        for _ in 0..100 {
            (0..capacity as u32).for_each(|page| order.installed(page, Installed::ZeroFill));
            (0..capacity as u32).for_each(|page| order.removed(page));
        }
        let bytes = order.memory_bytes();
        assert!(bytes < capacity * MAX_BYTES_PER_PAGE + (1 << 17), "{}: {bytes}", order.name());
    }
}
