//! What the host does to have memory back, until it has it.

use super::{
    guest::{Guest, TICK},
    plan::{End, Given},
    ways::{Way, next_request},
};
use crate::bench::interrupt;
use hecaton_vm::guest_port::GuestMessage;
use std::{
    thread,
    time::{Duration, Instant},
};

/// How long the manager in the guest may take to be ready; the agent waits no longer either.
const READY: Duration = Duration::from_secs(2);

/// How much, and how.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wish {
    pub(super) way: Way,
    /// What the device is to have in the end, in bytes.
    pub(super) target: u64,
    /// What is asked for at once, in ways that have batches.
    pub(super) batch: u64,
    /// When it is given up.
    pub(super) limit: Duration,
}

/// One that is under way.
pub(super) struct Shrink {
    wish: Wish,
    before: u64,
    begun: Instant,
    /// The guest was told with this number, and has not answered.
    waits_for: Option<u64>,
    ready_seconds: Option<f64>,
    requested: Option<u64>,
    given: Option<Given>,
}

impl Shrink {
    pub(super) fn begin(guest: &mut Guest<'_>, wish: Wish) -> anyhow::Result<Self> {
        let before = guest.device()?.plugged_bytes;
        let begun = Instant::now();
        let waits_for = wish.way.is_told().then(|| guest.announce(wish.target)).transpose()?;
        Ok(Self {
            wish,
            before,
            begun,
            waits_for,
            ready_seconds: None,
            requested: None,
            given: None,
        })
    }

    /// Goes on; what was given, once all is, or it is given up.
    pub(super) fn step(&mut self, guest: &mut Guest<'_>) -> anyhow::Result<Option<Given>> {
        if self.given.is_some() {
            return Ok(self.given);
        }
        if let Some(id) = self.waits_for {
            let is_ready =
                matches!(guest.hear()?, Some(GuestMessage::Ready { id: of, .. }) if of == id);
            if !is_ready && self.begun.elapsed() < READY {
                return Ok(None);
            }
            self.waits_for = None;
            self.ready_seconds = Some(self.begun.elapsed().as_secs_f64());
        }
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
            guest.request(bytes)?;
            self.requested = Some(bytes);
        }
        Ok(self.given)
    }
}

/// Has several guests give at the same time, each in its own way; what each has given.
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
