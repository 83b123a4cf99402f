//! Summarizes a series of measurements: median, spread, percentiles.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Median, smallest and largest value of some rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

impl Spread {
    /// `None` without values. With an even number, the median is the mean of the middle two.
    pub(crate) fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 {
            sorted[middle]
        } else {
            (sorted[middle - 1] + sorted[middle]) / 2.0
        };
        Some(Self { median, min, max })
    }
}

/// Latencies of one kind of operation, in nanoseconds with three significant digits.
pub(crate) struct Latencies(Histogram<u64>);

/// Percentiles in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Percentiles {
    pub(crate) count: u64,
    pub(crate) p50_us: f64,
    pub(crate) p90_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) max_us: f64,
}

impl Latencies {
    pub(crate) fn new() -> Self {
        let longest_ns = Duration::from_secs(60).as_nanos() as u64;
        Self(Histogram::new_with_bounds(1, longest_ns, 3).expect("the bounds are valid"))
    }

    pub(crate) fn record(&mut self, latency: Duration) {
        self.0.saturating_record(latency.as_nanos() as u64);
    }

    /// Adds the latencies of `other`.
    pub(crate) fn add(&mut self, other: &Self) {
        self.0.add(&other.0).expect("their bounds are the same");
    }

    pub(crate) fn percentiles(&self) -> Percentiles {
        let at = |quantile| self.0.value_at_quantile(quantile) as f64 / 1e3;
        Percentiles {
            count: self.0.len(),
            p50_us: at(0.5),
            p90_us: at(0.9),
            p99_us: at(0.99),
            max_us: self.0.max() as f64 / 1e3,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_of_the_sorted_values() {
        let spread = Spread::of(&[9.0, 1.0, 5.0]);
        assert_eq!(spread, Some(Spread { median: 5.0, min: 1.0, max: 9.0 }));
        assert_eq!(Spread::of(&[4.0, 2.0]).map(|spread| spread.median), Some(3.0));
        assert_eq!(Spread::of(&[]), None);
    }

    #[test]
    fn percentiles_are_in_microseconds() {
        let mut latencies = Latencies::new();
        for us in 1..=100 {
            latencies.record(Duration::from_micros(us));
        }
        let percentiles = latencies.percentiles();
        assert_eq!(percentiles.count, 100);
        assert!((percentiles.p50_us - 50.0).abs() < 0.1, "{percentiles:?}");
        assert!((percentiles.p99_us - 99.0).abs() < 0.1, "{percentiles:?}");
        assert!((percentiles.max_us - 100.0).abs() < 0.1, "{percentiles:?}");
    }
}
