//! What a second copy of each page costs faults: those of `bench fault`, with one copy and with two in
//! turns.

use crate::{
    bench::{cluster::Cluster, fault, stats::Spread},
    table::Table,
};
use anyhow::Context as _;
use hecaton_memory::{Size, pages_for_bytes};
use serde::Serialize;
use std::net::SocketAddr;

/// How often each is measured.
const ROUNDS: usize = 3;

/// Medians of the rounds; each value in them is a median, too.
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
}

pub(super) fn measure(
    cluster: &Cluster,
    wire: SocketAddr,
    size: Size,
    quick: bool,
) -> anyhow::Result<Mirroring> {
    let rounds = if quick { 1 } else { ROUNDS };
    let pages = pages_for_bytes(size.0);
    let samples = (pages / 2).min(20_000);
    let mut medians = [const { Vec::new() }; 4];
    for _ in 0..rounds {
        for (at, copies) in [(0, 1), (2, 2)] {
            let (quiet, evicting) = fault::medians(cluster, wire, pages, samples, copies)?;
            medians[at].push(quiet);
            medians[at + 1].push(evicting);
        }
    }
    let of = |at: usize| Spread::of(&medians[at]).map(|spread| spread.median).context("no round");
    let (one, one_evicting, two, two_evicting) = (of(0)?, of(1)?, of(2)?, of(3)?);
    Ok(Mirroring {
        rounds,
        one_fault_p50_us: one,
        two_fault_p50_us: two,
        fault_ratio: two / one,
        one_evicting_fault_p50_us: one_evicting,
        two_evicting_fault_p50_us: two_evicting,
        evicting_fault_ratio: two_evicting / one_evicting,
        aim_ratio: 1.15,
    })
}

pub(super) fn show(of: &Mirroring) {
    let mut table =
        Table::figures(["fault p50, µs", "one copy", "two copies", "two to one", "aim"]);
    let rows = [
        ("nothing evicting", of.one_fault_p50_us, of.two_fault_p50_us, of.fault_ratio),
        (
            "half dirty and evicting",
            of.one_evicting_fault_p50_us,
            of.two_evicting_fault_p50_us,
            of.evicting_fault_ratio,
        ),
    ];
    for (name, one, two, ratio) in rows {
        table.row([
            name.to_owned(),
            format!("{one:.1}"),
            format!("{two:.1}"),
            format!("{ratio:.2} ×"),
            format!("{:.2} ×", of.aim_ratio),
        ]);
    }
    print!("{table}");
}
