//! Counts what happened in a run.

/// Counts of one run or of several, which show whether the seeds reach everything.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) reads: u64,
    pub(crate) interrupted: u64,
    pub(crate) unreachable: u64,
    pub(crate) lost: u64,
    pub(crate) no_room: u64,
    pub(crate) fenced: u64,
    pub(crate) takeovers: u64,
    pub(crate) restarts: u64,
    /// Messages that arrived garbled, and ended their connections.
    pub(crate) garbled: u64,
    pub(crate) expired: u64,
    pub(crate) copies_made: u64,
    pub(crate) lost_with_copies: u64,
    pub(crate) drains: u64,
    pub(crate) recalls: u64,
    pub(crate) hosts_changed: u64,
    /// Recalls on a good network that brought back everything, or all that others had room for.
    pub(crate) given_back: u64,
    pub(crate) nobody_had_room: u64,
    pub(crate) copies_left: u64,
    /// Pages repaired because a copy that had them right was about to leave.
    pub(crate) repaired_for_moves: u64,
    /// Extents that were moved to a disk, and moved back.
    pub(crate) parked: u64,
    pub(crate) fetched: u64,
    pub(crate) decayed: u64,
    pub(crate) repaired: u64,
    pub(crate) given_up: u64,
    pub(crate) coded: u64,
    pub(crate) thawed: u64,
    pub(crate) rebuilt: u64,
    pub(crate) decoded: u64,
    /// Pages damaged in every copy, as found by a read, and as found by the scrub.
    pub(crate) decayed_everywhere: u64,
    pub(crate) found_lost: u64,
    /// Terms of managers, writes refused because their term was over, and writes that came after
    /// later writes.
    pub(crate) terms: u64,
    pub(crate) superseded: u64,
    pub(crate) overtaken: u64,
    /// Number of writes that failed because a manager's disk was full.
    pub(crate) refused_by_disks: u64,
    /// Orders that managers acknowledged, and orders with unknown outcome.
    pub(crate) orders: u64,
    pub(crate) orders_unsure: u64,
    pub(crate) manager_crashes: u64,
    /// Nodes that were lost with the memory that they had lent, and had to be admitted again.
    pub(crate) recoveries: u64,
    /// Ticks in which no manager led.
    pub(crate) leaderless: u64,
}

impl Tally {
    pub(crate) fn add(&mut self, other: &Tally) {
        self.reads += other.reads;
        self.interrupted += other.interrupted;
        self.unreachable += other.unreachable;
        self.lost += other.lost;
        self.no_room += other.no_room;
        self.fenced += other.fenced;
        self.takeovers += other.takeovers;
        self.restarts += other.restarts;
        self.garbled += other.garbled;
        self.expired += other.expired;
        self.copies_made += other.copies_made;
        self.lost_with_copies += other.lost_with_copies;
        self.drains += other.drains;
        self.recalls += other.recalls;
        self.hosts_changed += other.hosts_changed;
        self.given_back += other.given_back;
        self.nobody_had_room += other.nobody_had_room;
        self.copies_left += other.copies_left;
        self.repaired_for_moves += other.repaired_for_moves;
        self.parked += other.parked;
        self.fetched += other.fetched;
        self.decayed += other.decayed;
        self.repaired += other.repaired;
        self.given_up += other.given_up;
        self.coded += other.coded;
        self.thawed += other.thawed;
        self.rebuilt += other.rebuilt;
        self.decoded += other.decoded;
        self.decayed_everywhere += other.decayed_everywhere;
        self.found_lost += other.found_lost;
        self.terms += other.terms;
        self.superseded += other.superseded;
        self.overtaken += other.overtaken;
        self.refused_by_disks += other.refused_by_disks;
        self.orders += other.orders;
        self.orders_unsure += other.orders_unsure;
        self.manager_crashes += other.manager_crashes;
        self.recoveries += other.recoveries;
        self.leaderless += other.leaderless;
    }
}
