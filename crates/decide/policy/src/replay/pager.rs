//! The pager of the replay: residency, staging, batches; no data.

use super::{Program, trace::Reference};
use crate::{
    evict::{EvictionClock, Installed, Order},
    prefetch::{Prefetcher, Window},
};
use serde::Serialize;
use std::collections::{HashMap, VecDeque};

/// Staging's share of local memory, and its limit in pages.
const STAGING_SHARE: usize = 64;
const MAX_STAGING_PAGES: usize = 2048;

/// Pages evicted at a time, at most.
const MAX_BATCH_PAGES: usize = 64;

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Untouched,
    Mapped { clean: bool },
    Staged { ticket: u64, stamp: u32, trigger: bool },
    Away { stamp: u32 },
}

/// Counts of a replay, in pages.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug, Serialize)]
pub struct Outcome {
    /// Fetched again because of a fault, after an eviction.
    pub refetches: u64,
    /// Faults on evicted pages that were still in staging.
    pub rescues: u64,
    /// Fetched ahead.
    pub prefetched: u64,
    /// Faults on triggers.
    pub trigger_faults: u64,
    /// The most pages ever mapped or staged.
    pub peak_local_pages: usize,
}

struct Pager<'a> {
    order: &'a mut dyn Order,
    prefetcher: Option<&'a mut Prefetcher>,
    index: HashMap<u64, u32>,
    pages: &'a [u64],
    states: Vec<State>,
    staging: VecDeque<(u32, u64)>,
    staged: usize,
    tickets: u64,
    mapped: usize,
    mapped_limit: usize,
    staging_limit: usize,
    batch: usize,
    victims: Vec<u32>,
    clock: EvictionClock,
    outcome: Outcome,
}

/// Runs `program` within `capacity_pages` under `order`, with prefetching if a prefetcher is given.
pub fn replay(
    program: &Program,
    capacity_pages: usize,
    order: &mut dyn Order,
    prefetcher: Option<&mut Prefetcher>,
) -> Outcome {
    let staging_limit = (capacity_pages / STAGING_SHARE).clamp(1, MAX_STAGING_PAGES);
    let mut pager = Pager {
        order,
        prefetcher,
        index: program.pages.iter().zip(0..).map(|(&page, at)| (page, at)).collect(),
        pages: &program.pages,
        states: vec![State::Untouched; program.pages.len()],
        staging: VecDeque::new(),
        staged: 0,
        tickets: 0,
        mapped: 0,
        mapped_limit: capacity_pages.saturating_sub(staging_limit).max(1),
        staging_limit,
        batch: (capacity_pages / 64).clamp(1, MAX_BATCH_PAGES),
        victims: Vec::new(),
        clock: EvictionClock::new(capacity_pages),
        outcome: Outcome::default(),
    };
    for reference in &program.references {
        pager.touch(reference);
    }
    pager.outcome
}

impl Pager<'_> {
    fn touch(&mut self, reference: &Reference) {
        let (at, write, thread) = (reference.page as u32, reference.write, reference.thread.into());
        let page = self.pages[at as usize];
        match self.states[at as usize] {
            State::Mapped { clean } => {
                if clean && write {
                    self.order.referenced(at);
                    self.states[at as usize] = State::Mapped { clean: false };
                }
            }
            State::Untouched => self.map(at, !write, Installed::ZeroFill),
            State::Staged { trigger, stamp, .. } => {
                self.staged -= 1;
                if trigger {
                    self.outcome.trigger_faults += 1;
                    let distance = self.clock.distance(stamp);
                    self.map(at, !write, Installed::PrefetchedAgain { distance });
                    let next =
                        self.prefetcher.as_mut().and_then(|p| p.on_trigger_hit(thread, page));
                    self.fetch_ahead(next);
                } else {
                    self.outcome.rescues += 1;
                    self.map(at, !write, Installed::Rescued);
                    let window = self.prefetcher.as_mut().and_then(|p| p.on_fault(thread, page));
                    self.fetch_ahead(window);
                }
            }
            State::Away { stamp } => {
                self.outcome.refetches += 1;
                let distance = self.clock.distance(stamp);
                self.map(at, !write, Installed::Refault { distance });
                let window = self.prefetcher.as_mut().and_then(|p| p.on_fault(thread, page));
                self.fetch_ahead(window);
            }
        }
        self.outcome.peak_local_pages =
            self.outcome.peak_local_pages.max(self.mapped + self.staged);
    }

    fn map(&mut self, at: u32, clean: bool, how: Installed) {
        if self.mapped >= self.mapped_limit {
            self.evict();
        }
        self.states[at as usize] = State::Mapped { clean };
        self.mapped += 1;
        self.order.installed(at, how);
    }

    fn evict(&mut self) {
        let mut victims = std::mem::take(&mut self.victims);
        let states = &self.states;
        let mut still = |at: u32| matches!(states[at as usize], State::Mapped { .. });
        self.order.victims(self.batch, &mut still, &mut victims);
        for at in victims.drain(..) {
            self.clock.advance(1);
            self.mapped -= 1;
            self.stage(at, self.clock.stamp(), false);
        }
        self.victims = victims;
    }

    fn stage(&mut self, at: u32, stamp: u32, trigger: bool) {
        while self.staged >= self.staging_limit {
            let Some((oldest, its_ticket)) = self.staging.pop_front() else { break };
            if let State::Staged { ticket, stamp, trigger } = self.states[oldest as usize]
                && ticket == its_ticket
            {
                self.staged -= 1;
                self.states[oldest as usize] = State::Away { stamp };
                if trigger && let Some(prefetcher) = &mut self.prefetcher {
                    prefetcher.on_window_dead(self.pages[oldest as usize]);
                }
            }
        }
        self.tickets += 1;
        self.staging.push_back((at, self.tickets));
        self.staged += 1;
        self.states[at as usize] = State::Staged { ticket: self.tickets, stamp, trigger };
    }

    fn fetch_ahead(&mut self, window: Option<Window>) {
        let Some(window) = window else { return };
        let away: Vec<(u32, u32)> = (0..window.count)
            .filter_map(|place| Some((place, *self.index.get(&window.page(place))?)))
            .filter(|&(_, at)| matches!(self.states[at as usize], State::Away { .. }))
            .collect();
        let trigger =
            away.iter().map(|&(place, _)| place).min_by_key(|p| p.abs_diff(window.trigger));
        for &(place, at) in &away {
            let State::Away { stamp } = self.states[at as usize] else { continue };
            self.outcome.prefetched += 1;
            if Some(place) == trigger {
                self.stage(at, stamp, true);
            } else {
                let distance = self.clock.distance(stamp);
                self.map(at, true, Installed::PrefetchedAgain { distance });
            }
        }
        if let Some(prefetcher) = &mut self.prefetcher {
            let trigger = trigger.map(|place| window.page(place));
            prefetcher.on_window_issued(&window, away.len() as u32, trigger);
        }
    }
}
