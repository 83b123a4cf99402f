//! Tracks lending and its limits for donors that share memory with machines.

use super::divide::Lender;
use super::places::Places;
use crate::donors::DonorReport;
use hecaton_broker::{Elastic, NodeNo, Order};

/// Limits of a NUMA node's donors: one in force, and one that not all donors have confirmed.
#[derive(Debug, Default)]
pub(super) struct Lending {
    pub(super) limit_bytes: u64,
    pub(super) done: Order,
    pub(super) ordered: Option<(Order, u64, Vec<u64>)>,
    pub(super) ephemeral_done: Order,
}

impl Lending {
    /// Limit and use of these donors. An order is done once each donor confirms its part of it.
    pub(super) fn look(&mut self, donors: &[&DonorReport]) -> Elastic {
        let is_told = |donor: &DonorReport, part: u64| {
            let told = donor.stats.as_ref().and_then(|stats| stats.told_limit_bytes);
            told.unwrap_or(donor.lend_bytes) <= part
        };
        if let Some((order, limit_bytes, parts)) = &self.ordered
            && donors.iter().zip(parts).all(|(donor, part)| is_told(donor, *part))
        {
            (self.limit_bytes, self.done) = (*limit_bytes, *order);
            self.ordered = None;
        }
        let used_bytes = lenders(donors).iter().map(|lender| lender.used_bytes).sum();
        Elastic { limit_bytes: self.limit_bytes, used_bytes, done: self.done }
    }
}

/// Whether the donor shares memory with machines. Huge pages are set aside for donors for good.
pub(super) fn shares_memory(donor: &DonorReport) -> bool {
    !donor.memory.huge_pages
}

/// Donors that share memory on one NUMA node: always the same donors, in the same order.
pub(super) fn lending<'a>(
    donors: &'a [DonorReport],
    at: NodeNo,
    places: Places<'_>,
) -> Vec<&'a DonorReport> {
    let is_there = |donor: &&DonorReport| places.of(donor.memory.numa_node) == Some(at);
    donors.iter().filter(|donor| shares_memory(donor)).filter(is_there).collect()
}

pub(super) fn lenders(donors: &[&DonorReport]) -> Vec<Lender> {
    let used = |donor: &DonorReport| donor.stats.as_ref().map_or(0, |stats| stats.in_use_bytes());
    donors
        .iter()
        .map(|donor| Lender { lend_bytes: donor.lend_bytes, used_bytes: used(donor) })
        .collect()
}

/// Bytes that the host has really given these donors.
pub(super) fn committed_bytes(donors: &[&DonorReport]) -> u64 {
    let stats = donors.iter().filter_map(|donor| donor.stats.as_ref());
    stats.map(|stats| stats.committed_bytes).sum()
}
