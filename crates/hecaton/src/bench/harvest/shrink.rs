//! Reclaims guest memory as the host does, until done or out of time.

use super::{
    guest::{Guest, TICK},
    plan::{End, Given},
    ways::{Way, next_request},
};
use crate::bench::world::interrupt;
use hecaton_vm::guest_port::GuestMessage;
use std::{
    thread,
    time::{Duration, Instant},
};

/// Limit for the manager in the guest to be ready; the agent waits no longer either.
const READY: Duration = Duration::from_secs(2);

/// The amount to reclaim, and the way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wish {
    pub(super) way: Way,
    /// Size of the device in the end, in bytes.
    pub(super) target: u64,
    /// Bytes of one request, in ways that have batches.
    pub(super) batch: u64,
    /// Time after which the shrink is given up.
    pub(super) limit: Duration,
}

/// Minimum time between two reminders to a guest.
const BETWEEN_REMINDERS: Duration = Duration::from_secs(1);

/// A notice that the guest has not answered yet.
struct Told {
    /// Number of the notice.
    id: u64,
    /// Size in bytes that the device can shrink to already, as the guest has said.
    least: u64,
    /// Start of the guest's time limit.
    since: Instant,
    /// Last request for memory that the guest has not given; none before its time is up.
    overdue: Option<Instant>,
}

/// A shrink in progress.
pub(super) struct Shrink {
    wish: Wish,
    before: u64,
    begun: Instant,
    told: Option<Told>,
    ready_seconds: Option<f64>,
    requested: Option<u64>,
    given: Option<Given>,
}

impl Shrink {
    pub(super) fn begin(guest: &mut Guest<'_>, wish: Wish) -> anyhow::Result<Self> {
        let before = guest.device()?.plugged_bytes;
        let begun = Instant::now();
        let id = wish.way.is_told().then(|| guest.announce(wish.target)).transpose()?;
        let told = id.map(|id| Told { id, least: before, since: begun, overdue: None });
        Ok(Self { wish, before, begun, told, ready_seconds: None, requested: None, given: None })
    }

    /// Continues the shrink. Returns what the guest gave, once it gave all or is given up.
    pub(super) fn step(&mut self, guest: &mut Guest<'_>) -> anyhow::Result<Option<Given>> {
        if self.given.is_some() {
            return Ok(self.given);
        }
        self.hear(guest)?;
        let plugged = guest.device()?.plugged_bytes;
        let elapsed = self.begun.elapsed();
        let end = match plugged <= self.wish.target {
            true => Some(End::All),
            false => (elapsed >= self.wish.limit).then_some(End::GivenUp),
        };
        if let Some(end) = end {
            let bytes = self.before - plugged;
            self.given = Some(Given {
                bytes,
                seconds: elapsed.as_secs_f64(),
                ready_seconds: self.ready_seconds,
                end,
            });
            if self.wish.way.is_told() {
                guest.cancel()?;
            }
        } else if self.requested.is_none_or(|requested| plugged <= requested) {
            let batch = self.wish.way.has_batches().then_some(self.wish.batch);
            let bytes = next_request(plugged, self.wish.target, batch);
            if self.may_ask_for(bytes) {
                guest.request(bytes)?;
                self.requested = Some(bytes);
            }
        }
        Ok(self.given)
    }

    /// Handles the guest's messages about being ready. Like the agent, it reminds a late guest.
    fn hear(&mut self, guest: &mut Guest<'_>) -> anyhow::Result<()> {
        while let Some(message) = guest.hear()? {
            let Some(told) = &mut self.told else { continue };
            match message {
                GuestMessage::Giving { id, size_bytes } if id == told.id => {
                    told.least = told.least.min(guest.device_of(size_bytes));
                }
                GuestMessage::Ready { id, .. } if id == told.id => told.least = 0,
                _ => continue,
            }
            let is_ready = told.least == 0;
            if let (Some(at), Some(requested)) = (&mut told.overdue, self.requested)
                && (is_ready || at.elapsed() >= BETWEEN_REMINDERS)
            {
                *at = Instant::now();
                guest.remind(requested)?;
            }
            if is_ready {
                self.told = None;
                self.ready_seconds = Some(self.begun.elapsed().as_secs_f64());
            }
        }
        Ok(())
    }

    /// Like the agent, asks at once for what the guest gave, else when it is ready or time is up.
    fn may_ask_for(&mut self, bytes: u64) -> bool {
        let Some(told) = &mut self.told else { return true };
        if told.overdue.is_some() {
            return true;
        }
        if bytes >= told.least {
            told.since = Instant::now();
            return true;
        }
        let is_overdue = told.since.elapsed() >= READY;
        told.overdue = is_overdue.then(Instant::now);
        is_overdue
    }
}

/// Shrinks several guests at the same time, each by `wish`. Returns what each gave.
pub(super) fn shrink(guests: &mut [&mut Guest<'_>], wish: Wish) -> anyhow::Result<Vec<Given>> {
    let begin = |guest: &mut &mut Guest<'_>| Shrink::begin(guest, wish);
    let mut shrinks = guests.iter_mut().map(begin).collect::<anyhow::Result<Vec<_>>>()?;
    loop {
        let steps = shrinks.iter_mut().zip(guests.iter_mut());
        let given: anyhow::Result<Option<Vec<Given>>> = steps
            .map(|(shrink, guest)| shrink.step(guest))
            .collect::<anyhow::Result<Vec<_>>>()
            .map(|given| given.into_iter().collect());
        if let Some(given) = given? {
            return Ok(given);
        }
        interrupt::check()?;
        thread::sleep(TICK);
    }
}
