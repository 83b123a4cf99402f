//! Our own first level: targets that run ahead of demand, shared max-min fairly.
//!
//! Where the paper's TLP moves a target by P % of the node's memory after the fact, this estimates
//! from history what each consumer *could use*, and divides the memory max-min fairly among these
//! bids.
//!
//! - *Growing*: the bid is what is used, and what the smoothed growth will add in the next few
//!   periods. So the target is there before a put fails.
//! - *Failing*: the bid doubles in each period with failed puts, as TCP's slow start does, from
//!   what failed. Nothing depends on a percentage that is right for one node's size and wrong for
//!   another's.
//! - *Fair at any speed*: a large bid is no large share. Contended memory is divided evenly, so
//!   adaptability costs no fairness. The paper's P trades one for the other.
//! - *Idle*: a page that is neither stored nor read back in a long time is of no use in memory. A
//!   consumer cannot have touched more pages than it stored and read, so the rest of its pages are
//!   idle. That needs no access bits. Idle pages leave the bid, and are taken back when another
//!   consumer is in want: the paper's own open question (section V-C).
//! - *In want*: a consumer that finds no room waits for its disk, and touches fewer of its pages.
//!   They would look idle and be taken next. So its pages must lie still for longer, counted from
//!   when the want began.
//! - *Calm*: a bid falls slowly, and a target that would change by little is left as it is.
//!
//! Invariants, which the property tests hold (`tests/behaviour/targets.rs`):
//!
//! 1. The sum of the targets is at most what the node owns.
//! 2. A target changes by at most [`Settings::step_permille`] of what the node owns (and at least
//!    [`Settings::minimum_pages`] is always allowed), unless the node owns less than the targets
//!    were.
//! 3. Everyone's target is at least the minimum, or an equal portion if that is less, within the
//!    steps of 2.
//! 4. Under steady demand everyone comes to its max-min fair share, but for the band, within
//!    `1000 / step_permille` periods and those in which its bid doubles: nobody starves.
//! 5. Only idle pages are taken back, and no more than others lack.

use super::{Decision, Situation, present_target, share};
use crate::cluster::ConsumerId;
use crate::cluster::account::ConsumerStatistics;
use serde::Serialize;
use std::collections::HashMap;

/// Settings of the anticipating policy. A period is a second.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Settings {
    /// Periods of growth to be ahead of.
    pub lookahead_periods: u64,
    /// Periods without use after which a page counts as idle; of a consumer in want, after six
    /// times as many.
    pub idle_periods: u64,
    /// The least that a consumer's target falls to.
    pub minimum_pages: u64,
    /// The most that a target changes in a period, in thousandths of what the node owns.
    pub step_permille: u64,
    /// Changes of less than so many thousandths of a target are not made.
    pub band_permille: u64,
    /// Pages that a node keeps for itself beyond what is bid for, when others are in need.
    pub reserve_pages: u64,
    /// Whether idle pages are taken back.
    pub take_back: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            lookahead_periods: 5,
            idle_periods: 10,
            minimum_pages: 1024,
            step_permille: 100,
            band_permille: 20,
            reserve_pages: 2048,
            take_back: true,
        }
    }
}

/// Failing periods after which a bid does not double any more.
const DOUBLINGS: u32 = 6;

/// Factor by which pages of a consumer in want must lie still for longer to count as idle.
const LONGER_IN_WANT: u64 = 6;

/// Part of a bid's excess over the estimate that the bid keeps each period: 3 of 4.
const DECAY: (u64, u64) = (3, 4);

/// A consumer that used a page or more holds so much beyond it: one sixteenth.
const HEADROOM: u64 = 16;

/// History of one consumer.
#[derive(Clone, Copy, Debug, Default)]
struct History {
    used_pages: u64,
    /// Pages a period, smoothed; negative while it shrinks.
    growth: i64,
    /// Stored and read in about the last [`History::still_periods`]: no more distinct pages can
    /// have been touched.
    touched_pages: u64,
    periods_failing: u32,
    /// Periods for which it still counts as in want: `idle_periods` after its last failed put.
    periods_in_want: u32,
    /// Periods that it has been known, or in want, up to [`History::still_periods`]. Before that,
    /// nothing counts as idle.
    periods_known: u64,
    bid_pages: u64,
    /// The period in which it was last seen, to forget those that have gone.
    seen: u64,
}

// One for each consumer of the cluster in a simulation of it: `docs/scale.md` counts on that.
const _: () = assert!(size_of::<History>() == 56);

/// Histories of all consumers of a node, and buffers for the decisions.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    histories: HashMap<ConsumerId, History>,
    period: u64,
    floors: Vec<u64>,
    bids: Vec<u64>,
    shares: Vec<u64>,
    more: Vec<u64>,
}

impl Memory {
    pub(super) fn decide(
        &mut self,
        settings: &Settings,
        situation: &Situation<'_>,
        decision: &mut Decision,
    ) {
        let consumers = situation.consumers;
        let divisible = situation.total_pages.saturating_sub(situation.owed_pages);
        let portion = divisible / (consumers.len() as u64).max(1);
        let minimum = settings.minimum_pages.min(portion);
        self.estimate(settings, situation);
        self.floors.clear();
        self.floors.resize(consumers.len(), minimum);
        for bid in &mut self.bids {
            *bid = (*bid).max(minimum);
        }
        // The manager goes by what the statistics say is wanted, and is not asked beside.
        decision.wanted_pages = sum(&self.bids);
        decision.request_pages = 0;

        self.divide(divisible, consumers);
        self.move_towards(settings, situation, minimum);
        decision.targets.extend(self.shares.iter().map(|&target| Some(target)));
        if settings.take_back {
            self.take_back(settings, situation, &mut decision.take_back);
        }
    }

    /// Idle pages beyond the targets, as many as are lacking: what others bid for and may have, and
    /// what the manager has asked for, less what is free.
    fn take_back(&self, settings: &Settings, situation: &Situation<'_>, take_back: &mut [u64]) {
        let mut lacking = situation.owed_pages;
        let mut used = 0u64;
        let targets = self.shares.iter().zip(situation.consumers);
        for ((&target, consumer), taken) in targets.zip(take_back.iter_mut()) {
            let history = self.histories.get(&consumer.id).copied().unwrap_or_default();
            let may_have = target.min(history.bid_pages).saturating_sub(consumer.used_pages);
            lacking = lacking.saturating_add(may_have);
            used = used.saturating_add(consumer.used_pages);
            let beyond = consumer.used_pages.saturating_sub(target);
            *taken = beyond.min(history.idle_pages(settings));
        }
        let free = situation.total_pages.saturating_sub(used);
        share::scale_to_fit(take_back, lacking.saturating_sub(free));
    }

    /// Brings the histories up to date, and the bids.
    fn estimate(&mut self, settings: &Settings, situation: &Situation<'_>) {
        self.period += 1;
        self.bids.clear();
        for consumer in situation.consumers {
            let known = self.histories.entry(consumer.id).or_insert_with(|| History {
                used_pages: consumer.used_pages,
                bid_pages: consumer.used_pages,
                ..History::default()
            });
            known.observe(settings, situation.total_pages, consumer);
            known.seen = self.period;
            self.bids.push(known.bid_pages);
        }
        if self.histories.len() > situation.consumers.len() {
            let now = self.period;
            self.histories.retain(|_, history| history.seen == now);
        }
    }

    /// Shares for the bids; what is left goes to who holds more than it bids for, so that no put
    /// fails without need, and the rest evenly to all, for bursts that nobody foresees.
    fn divide(&mut self, divisible: u64, consumers: &[ConsumerStatistics]) {
        let Memory { floors, bids, shares, more, .. } = self;
        share::max_min(divisible, floors, bids, shares);
        let mut left = divisible - sum(shares);
        if left > 0 && !consumers.is_empty() {
            let held = consumers.iter().zip(shares.iter());
            bids.clear();
            bids.extend(held.map(|(consumer, share)| consumer.used_pages.saturating_sub(*share)));
            floors.fill(0);
            share::max_min(left, floors, bids, more);
            left -= sum(more);
            let each = left / consumers.len() as u64;
            for (share, more) in shares.iter_mut().zip(more.iter()) {
                *share += more + each;
            }
        }
    }

    /// Turns the shares into targets: within a step of the present ones, and unmoved for small
    /// changes. Targets that fall come first. The gains are scaled down to what the sum allows.
    fn move_towards(&mut self, settings: &Settings, situation: &Situation<'_>, minimum: u64) {
        let total = situation.total_pages;
        let step = permille(total, settings.step_permille).max(settings.minimum_pages);
        self.more.clear();
        let mut kept = 0u64;
        for (share, consumer) in self.shares.iter_mut().zip(situation.consumers) {
            let now = present_target(situation, consumer);
            let band = permille(now, settings.band_permille);
            let is_small = share.abs_diff(now) <= band && now >= minimum;
            let goal =
                if is_small { now } else { (*share).clamp(now.saturating_sub(step), now + step) };
            let gain = goal.saturating_sub(now);
            self.more.push(gain);
            *share = goal - gain;
            kept = kept.saturating_add(*share);
        }
        match total.checked_sub(kept) {
            Some(left) => {
                share::scale_to_fit(&mut self.more, left);
                for (target, gain) in self.shares.iter_mut().zip(&self.more) {
                    *target += gain;
                }
            }
            None => share::scale_to_fit(&mut self.shares, total),
        }
    }
}

impl History {
    fn observe(&mut self, settings: &Settings, total_pages: u64, now: &ConsumerStatistics) {
        let grown = now.used_pages as i64 - self.used_pages as i64;
        self.growth += (grown - self.growth) / 2;
        self.used_pages = now.used_pages;
        let was_in_want = self.periods_in_want > 0;
        self.periods_in_want = match now.puts_failed() {
            0 => self.periods_in_want.saturating_sub(1),
            _ => u32::try_from(settings.idle_periods).unwrap_or(u32::MAX),
        };
        if self.periods_in_want > 0 && !was_in_want {
            self.periods_known = 0;
        }
        let still_periods = self.still_periods(settings);
        self.periods_known = (self.periods_known + 1).min(still_periods);
        let forgotten = self.touched_pages.div_ceil(still_periods.max(1));
        self.touched_pages -= forgotten.min(self.touched_pages);
        let touched_now = now.gets.saturating_add(now.puts_succeeded);
        self.touched_pages = self.touched_pages.saturating_add(touched_now);
        if now.puts_failed() > 0 {
            self.periods_failing = (self.periods_failing + 1).min(DOUBLINGS);
            let failed = now.puts_failed().saturating_mul(settings.lookahead_periods);
            let surge = failed.max(settings.minimum_pages) << (self.periods_failing - 1);
            // At most as much again as it has, or a quarter of the node.
            let most = self.used_pages.max(total_pages / 4);
            let bid = self.used_pages.saturating_add(surge.min(most));
            self.bid_pages = self.bid_pages.max(bid).min(self.used_pages.saturating_add(most));
        } else {
            self.periods_failing = 0;
            let ahead = (self.growth.max(0) as u64).saturating_mul(settings.lookahead_periods);
            let in_use = self.used_pages - self.idle_pages(settings);
            let headroom = (in_use / HEADROOM).max(settings.minimum_pages);
            let goal = in_use.saturating_add(ahead).saturating_add(headroom);
            let above = self.bid_pages.saturating_sub(goal);
            self.bid_pages = goal.saturating_add(above / DECAY.1 * DECAY.0);
        }
    }

    /// Periods without use after which a page of this consumer counts as idle.
    fn still_periods(&self, settings: &Settings) -> u64 {
        match self.periods_in_want {
            0 => settings.idle_periods,
            _ => settings.idle_periods.saturating_mul(LONGER_IN_WANT),
        }
    }

    /// Pages that it holds and has not touched for long: at least so many.
    fn idle_pages(&self, settings: &Settings) -> u64 {
        match self.periods_known < self.still_periods(settings) {
            true => 0,
            false => self.used_pages.saturating_sub(self.touched_pages),
        }
    }
}

fn sum(pages: &[u64]) -> u64 {
    pages.iter().fold(0, |sum, &pages| sum.saturating_add(pages))
}

fn permille(pages: u64, permille: u64) -> u64 {
    (u128::from(pages) * u128::from(permille) / 1000) as u64
}
