//! Measures what a second copy of each page, encryption and an erasure code add to faults.
//! The faults are those of `bench fault`, on the kinds of pool memory in turns.

use crate::bench::fault;
use crate::bench::measure::stats::Spread;
use crate::bench::world::cluster::{CODE_DONORS, Cluster, PoolMemory};
use crate::terminal::table::Table;
use anyhow::Context as _;
use hecaton_memory::{Size, pages_for_bytes};
use serde::Serialize;
use std::{net::SocketAddr, path::Path};

/// Measurements of each kind of pool memory.
const ROUNDS: usize = 3;

/// Medians over the rounds; each round's value is itself a median.
#[derive(Serialize)]
pub(super) struct Mirroring {
    rounds: usize,
    one_fault_p50_us: f64,
    two_fault_p50_us: f64,
    fault_ratio: f64,
    one_evicting_fault_p50_us: f64,
    two_evicting_fault_p50_us: f64,
    evicting_fault_ratio: f64,
    aim_ratio: f64,
    /// Encrypted memory, with one copy.
    encrypted_fault_p50_us: f64,
    encrypted_evicting_fault_p50_us: f64,
    /// Ratio to one copy that is not encrypted.
    encrypted_fault_ratio: f64,
    encrypted_evicting_fault_ratio: f64,
    /// Memory coded 4+2, and the same memory in two copies, at six donors of an embedded cluster.
    coded_fault_p50_us: f64,
    uncoded_fault_p50_us: f64,
    coded_fault_ratio: f64,
}

/// Parameters of the measurement.
pub(super) struct Faults {
    pages: u64,
    samples: u64,
    rounds: usize,
}

impl Faults {
    pub(super) fn new(size: Size, quick: bool) -> Self {
        let pages = pages_for_bytes(size.0);
        let rounds = if quick { 1 } else { ROUNDS };
        Self { pages, samples: (pages / 2).min(20_000), rounds }
    }

    /// Measures on `cluster`. Coded memory is measured on a cluster of its own, in `dir`.
    pub(super) fn measure(
        &self,
        cluster: &Cluster,
        wire: SocketAddr,
        dir: &Path,
    ) -> anyhow::Result<Mirroring> {
        let Self { pages, samples, rounds } = *self;
        let kinds = [PoolMemory::Copies(1), PoolMemory::Copies(2), PoolMemory::Encrypted];
        let mut medians = kinds.map(|kind| (kind, Vec::new(), Vec::new()));
        for _ in 0..rounds {
            for (kind, quiet, evicting) in &mut medians {
                let (of_quiet, of_evicting) = fault::medians(cluster, wire, pages, samples, *kind)?;
                quiet.push(of_quiet);
                evicting.push(of_evicting);
            }
        }
        let [one, two, encrypted] = medians;
        let (one, one_evicting) = (median(&one.1)?, median(&one.2)?);
        let (two, two_evicting) = (median(&two.1)?, median(&two.2)?);
        let (encrypted, encrypted_evicting) = (median(&encrypted.1)?, median(&encrypted.2)?);
        let (coded, uncoded) = self.coded(dir)?;
        Ok(Mirroring {
            rounds,
            one_fault_p50_us: one,
            two_fault_p50_us: two,
            fault_ratio: two / one,
            one_evicting_fault_p50_us: one_evicting,
            two_evicting_fault_p50_us: two_evicting,
            evicting_fault_ratio: two_evicting / one_evicting,
            aim_ratio: 1.15,
            encrypted_fault_p50_us: encrypted,
            encrypted_evicting_fault_p50_us: encrypted_evicting,
            encrypted_fault_ratio: encrypted / one,
            encrypted_evicting_fault_ratio: encrypted_evicting / one_evicting,
            coded_fault_p50_us: coded,
            uncoded_fault_p50_us: uncoded,
            coded_fault_ratio: coded / uncoded,
        })
    }

    /// Medians in microseconds for coded memory, and for the same memory in two copies.
    fn coded(&self, dir: &Path) -> anyhow::Result<(f64, f64)> {
        let Self { pages, samples, rounds } = *self;
        // Enough for two copies of the region and the ballast.
        let bytes = hecaton_memory::pages_to_bytes(pages) * 6;
        let cluster = Cluster::start(CODE_DONORS, bytes, &dir.join("coded"))?;
        let wire = crate::bench::measure::wire::serve()?;
        let (mut coded, mut uncoded) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            coded.push(fault::coded_median(&cluster, wire, pages, samples)?);
            let copies = PoolMemory::Copies(2);
            uncoded.push(fault::medians(&cluster, wire, pages, samples, copies)?.0);
        }
        Ok((median(&coded)?, median(&uncoded)?))
    }
}

fn median(of: &[f64]) -> anyhow::Result<f64> {
    Spread::of(of).map(|spread| spread.median).context("no round")
}

pub(super) fn show(of: &Mirroring) {
    let mut table = Table::figures(["fault p50, µs", "without", "with", "ratio", "aim"]);
    let (one, one_evicting) = (of.one_fault_p50_us, of.one_evicting_fault_p50_us);
    let aim = Some(of.aim_ratio);
    let rows = [
        ("a second copy, nothing evicting", one, of.two_fault_p50_us, aim),
        ("a second copy, half dirty and evicting", one_evicting, of.two_evicting_fault_p50_us, aim),
        ("encrypted, nothing evicting", one, of.encrypted_fault_p50_us, None),
        (
            "encrypted, half dirty and evicting",
            one_evicting,
            of.encrypted_evicting_fault_p50_us,
            None,
        ),
        ("coded, against two copies", of.uncoded_fault_p50_us, of.coded_fault_p50_us, None),
    ];
    for (name, without, with, aim) in rows {
        table.row([
            name.to_owned(),
            format!("{without:.1}"),
            format!("{with:.1}"),
            format!("{:.2} ×", with / without),
            aim.map(|aim| format!("{aim:.2} ×")).unwrap_or_default(),
        ]);
    }
    print!("{table}");
}
