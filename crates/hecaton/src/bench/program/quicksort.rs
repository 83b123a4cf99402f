//! Quicksort of random integers, the application of the MemX paper (section 5): little work per
//! byte, large strides while partitioning, and a working set that shrinks level by level.

use crate::bench::world::process::peak_resident_bytes;
use anyhow::{Context as _, ensure};
use hecaton_memory::SplitMix;
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// Arguments of `quicksort`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many 64-bit integers.
    #[arg(long)]
    count: usize,
}

/// Both parts' times, and the most memory that was resident; the order and the sum of the result
/// are checked.
#[derive(Serialize, Deserialize)]
pub(super) struct Report {
    fill_s: f64,
    sort_s: f64,
    pub(super) peak_bytes: u64,
}

pub(super) fn run(args: &Args) -> anyhow::Result<Report> {
    let start = Instant::now();
    let mut random = SplitMix::new(args.count as u64);
    let mut numbers = Vec::with_capacity(args.count);
    numbers.extend((0..args.count).map(|_| random.draw()));
    let sum = total(&numbers);
    let fill_s = start.elapsed().as_secs_f64();

    let start = Instant::now();
    quicksort(&mut numbers);
    let sort_s = start.elapsed().as_secs_f64();
    ensure!(numbers.is_sorted(), "the result is not in order");
    ensure!(total(&numbers) == sum, "the result holds other numbers");
    let peak_bytes = peak_resident_bytes(std::process::id()).context("no resident memory")?;
    Ok(Report { fill_s, sort_s, peak_bytes })
}

fn total(numbers: &[u64]) -> u64 {
    numbers.iter().fold(0, |sum, number| sum.wrapping_add(*number))
}

/// Below this length insertion is faster than another partition.
const SHORT: usize = 24;

/// Hoare's partition around the median of three. Recursing into the shorter side only keeps the
/// depth below log₂ of the length.
fn quicksort(mut numbers: &mut [u64]) {
    while numbers.len() > SHORT {
        let middle = partition(numbers);
        let (left, right) = numbers.split_at_mut(middle);
        let (shorter, longer) =
            if left.len() < right.len() { (left, right) } else { (right, left) };
        quicksort(shorter);
        numbers = longer;
    }
    for end in 1..numbers.len() {
        let number = numbers[end];
        let mut at = end;
        while at > 0 && numbers[at - 1] > number {
            numbers[at] = numbers[at - 1];
            at -= 1;
        }
        numbers[at] = number;
    }
}

/// Where the right part begins; neither part is empty.
fn partition(numbers: &mut [u64]) -> usize {
    let (first, middle, last) =
        (numbers[0], numbers[numbers.len() / 2], numbers[numbers.len() - 1]);
    let pivot = first.min(last).max(middle.min(first.max(last)));
    let (mut left, mut right) = (0, numbers.len() - 1);
    loop {
        while numbers[left] < pivot {
            left += 1;
        }
        while numbers[right] > pivot {
            right -= 1;
        }
        if left >= right {
            return left.max(1);
        }
        numbers.swap(left, right);
        left += 1;
        right -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn sorts_like_the_standard_library(mut numbers in prop::collection::vec(0_u64..500, 0..900)) {
            let mut expected = numbers.clone();
            expected.sort_unstable();
            quicksort(&mut numbers);
            prop_assert_eq!(numbers, expected);
        }
    }

    #[test]
    fn sorts_what_makes_a_naive_quicksort_quadratic() {
        for mut numbers in [vec![7; 50_000], (0..50_000).collect(), (0..50_000).rev().collect()] {
            quicksort(&mut numbers);
            assert!(numbers.is_sorted());
        }
    }
}
