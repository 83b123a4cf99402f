//! What donors lend of the memory that machines have as well, and the limits that they are told.

use super::divide::Lender;
use super::places::Places;
use crate::donors::DonorReport;
use hecaton_broker::{Elastic, NodeNo, Order};

/// The limit of a NUMA node's donors: the one in force, and one that they have not all confirmed.
#[derive(Debug, Default)]
pub(super) struct Lending {
    pub(super) limit_bytes: u64,
    pub(super) done: Order,
    pub(super) ordered: Option<(Order, u64, Vec<u64>)>,
    pub(super) ephemeral_done: Order,
}

impl Lending {
    /// What these donors have. An order is carried out once each has said that it knows its part.
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

/// Whether it lends memory that machines have as well; huge pages were set aside for good.
pub(super) fn shares_memory(donor: &DonorReport) -> bool {
    !donor.memory.huge_pages
}

/// Donors of that memory on a NUMA node. Always the same ones in the same order.
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

/// What donors really have in memory.
pub(super) fn committed_bytes(donors: &[&DonorReport]) -> u64 {
    let stats = donors.iter().filter_map(|donor| donor.stats.as_ref());
    stats.map(|stats| stats.committed_bytes).sum()
}
