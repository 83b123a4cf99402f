//! Waits for events, with limits that `HECATON_TEST_PATIENCE` scales.
//!
//! `look` returns an outer error when the event cannot come any more: the wait ends at once. Its
//! inner error says what it saw: the wait goes on, and at the limit fails with the last of them.

use super::world::processes;
use anyhow::Context as _;
use hecaton_testkit::{TimedOut, scaled, wait_for, wait_for_every};
use std::{fmt::Display, time::Duration};

/// Waits until `look` returns a value, and returns that.
pub(crate) fn until<T, S: Display>(
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> anyhow::Result<Result<T, S>>,
) -> anyhow::Result<T> {
    outcome(what, wait_for(what, scaled(limit), || sorted(look())))
}

/// The same, with a pause of `tick` between two looks.
pub(crate) fn until_every<T, S: Display>(
    tick: Duration,
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> anyhow::Result<Result<T, S>>,
) -> anyhow::Result<T> {
    outcome(what, wait_for_every(tick, what, scaled(limit), || sorted(look())))
}

/// An error that ends the wait is its outcome.
fn sorted<T, S>(looked: anyhow::Result<Result<T, S>>) -> Result<anyhow::Result<T>, S> {
    match looked {
        Ok(Ok(value)) => Ok(Ok(value)),
        Ok(Err(seen)) => Err(seen),
        Err(error) => Ok(Err(error)),
    }
}

fn outcome<T>(what: &str, waited: Result<anyhow::Result<T>, TimedOut>) -> anyhow::Result<T> {
    if waited.is_err() {
        processes::note(what);
    }
    waited?.with_context(|| format!("while waiting for: {what}"))
}
