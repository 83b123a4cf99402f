//! How long a program's faults stall when a donor fails.

use super::{
    Site,
    failing::{Failing, Failure},
    steady::Steady,
};
use serde::Serialize;
use std::time::Duration;

/// Longest stalls of a program around one kind of failure. The quiet figures are of an equally long
/// time before each failure: on a busy machine the scheduler alone stalls a program.
#[derive(Serialize)]
pub(super) struct Stalls {
    pub(super) failures: usize,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    pub(super) max_ms: f64,
    pub(super) aim_max_ms: f64,
    pub(super) window_ms: f64,
    pub(super) quiet_p50_ms: f64,
    pub(super) quiet_p99_ms: f64,
    pub(super) quiet_max_ms: f64,
    /// The longest stall of each failure, in their order.
    pub(super) each_ms: Vec<f64>,
}

/// Has donors of the program fail so many times, one after the other, each when the copies that the
/// last one cost are there again.
pub(super) fn measure(
    site: &Site,
    program: &mut Steady,
    failure: Failure,
    failures: usize,
) -> anyhow::Result<Stalls> {
    let (mut each_ms, mut quiet_ms) = (Vec::new(), Vec::new());
    for round in 0..failures {
        quiet_ms.push(longest_ms(program, failure.window(), || Ok(()))?);
        let victims = site.donors()?;
        let victim = &victims[round % victims.len()];
        let mut failing = None;
        let stall = longest_ms(program, failure.window(), || {
            failing = Some(Failing::begin(failure, site, victim)?);
            Ok(())
        })?;
        each_ms.push(stall);
        if let Some(failing) = failing {
            failing.end()?;
        }
        program.until_whole()?;
    }
    let at = |values: &[f64], quantile| percentile(values, quantile);
    Ok(Stalls {
        failures,
        p50_ms: at(&each_ms, 0.5),
        p99_ms: at(&each_ms, 0.99),
        max_ms: at(&each_ms, 1.0),
        aim_max_ms: failure.aim().as_secs_f64() * 1e3,
        window_ms: failure.window().as_secs_f64() * 1e3,
        quiet_p50_ms: at(&quiet_ms, 0.5),
        quiet_p99_ms: at(&quiet_ms, 0.99),
        quiet_max_ms: at(&quiet_ms, 1.0),
        each_ms,
    })
}

/// The longest access within some time from `begin` on.
fn longest_ms(
    program: &mut Steady,
    time: Duration,
    begin: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<f64> {
    program.window()?;
    begin()?;
    std::thread::sleep(time);
    Ok(program.window()?.longest_us / 1e3)
}

/// By the nearest rank: a value that was measured.
fn percentile(values: &[f64], quantile: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (quantile * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let values: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        let at = |quantile| percentile(&values, quantile);
        assert_eq!((at(0.5), at(0.99), at(1.0)), (100.0, 198.0, 200.0));
        assert_eq!(percentile(&[7.0], 0.5), 7.0);
    }
}
