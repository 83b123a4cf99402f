//! Waits for events, with limits that `HECATON_TEST_PATIENCE` scales.
//!
//! `look` returns an outer error when the event cannot come any more: the wait ends at once. Its inner
//! error says what it saw: the wait goes on, and at the limit fails with the last of them.

use anyhow::Context as _;
use hecaton_testkit::{scaled, wait_for, wait_for_every};
use std::{fmt::Display, time::Duration};

/// Waits until `look` returns a value, and returns that.
pub(crate) fn until<T, S: Display>(
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> anyhow::Result<Result<T, S>>,
) -> anyhow::Result<T> {
    wait_for(what, scaled(limit), || sorted(look()))?.with_context(|| aborted(what))
}

/// The same, with a pause of `tick` between two looks.
pub(crate) fn until_every<T, S: Display>(
    tick: Duration,
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> anyhow::Result<Result<T, S>>,
) -> anyhow::Result<T> {
    wait_for_every(tick, what, scaled(limit), || sorted(look()))?.with_context(|| aborted(what))
}

/// An error that ends the wait is its outcome.
fn sorted<T, S>(looked: anyhow::Result<Result<T, S>>) -> Result<anyhow::Result<T>, S> {
    match looked {
        Ok(Ok(value)) => Ok(Ok(value)),
        Ok(Err(seen)) => Err(seen),
        Err(error) => Ok(Err(error)),
    }
}

fn aborted(what: &str) -> String {
    format!("while waiting for: {what}")
}
