//! Holds what spaces share: donors, the network to them, and the dice for failures.

use crate::borrower::Borrower;
use crate::dice::Dice;
use crate::donor::Donor;
use crate::network::{Answered, Asked, ConnId, Cut, Event, Network, ToBorrower};
use crate::tally::Tally;
use hecaton_memory::SpaceId;
use hecaton_space::group::{Group, Place};
use hecaton_transport::protocol::{PageState, Refusal};
use std::time::Duration;

/// Failures of a run, besides those of messages.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Conditions {
    /// Whether donors drain, or want some of their memory back, so that segments move.
    pub(crate) moves: bool,
    /// Whether donors are cut off in one direction only. A donor then hears requests but cannot
    /// answer, or the reverse. Coded seeds kept by name have no such cut, and run as ever.
    pub(crate) cuts_one_way: bool,
    /// Whether donors park extents that no other donor can take.
    pub(crate) parks: bool,
    /// Whether segments move and pages go bad, but nothing else goes wrong. Then no page is lost
    /// that was right in another copy when it went bad.
    pub(crate) is_calm: bool,
}

pub(crate) struct Pool {
    pub(crate) dice: Dice,
    pub(crate) net: Network,
    pub(crate) donors: Vec<Donor>,
    pub(crate) tally: Tally,
    boots: u64,
    pub(crate) conditions: Conditions,
}

impl Pool {
    pub(crate) fn new(dice: Dice, net: Network, donors: Vec<Donor>) -> Pool {
        let (tally, conditions) = (Tally::default(), Conditions::default());
        Pool { dice, net, donors, tally, boots: 100, conditions }
    }

    /// A donor reads from another donor, unless that source is unreachable.
    pub(crate) fn fill_begins(&mut self, conn: ConnId, id: u64, asked: &Asked) {
        let &Asked::Fill { extent, first, count, from: (source, boot, other) } = asked else {
            return;
        };
        let donor = self.net.donor_of(conn);
        let Some(who) = self.donors[donor].who(conn) else { return };
        let now_ms = self.net.now.as_millis() as u64;
        let pages = match !self.net.hears((donor, source), &mut self.dice) {
            true => Err(Refusal::NoSource),
            false => {
                let pages = first..first + count;
                self.donors[source].pages_for(who, boot, other, pages, now_ms)
            }
        };
        match pages {
            Ok(pages) => {
                // Other events may happen between the read and the store.
                let at = self.net.now + Duration::from_micros(self.dice.below(60_000));
                self.net.schedule(at, Event::Filled { conn, id, extent, first, pages });
            }
            Err(refusal) => self.answer_fill(conn, id, Err(refusal)),
        }
    }

    /// A donor looks for damaged pages, and reads them from another donor.
    pub(crate) fn repair_begins(&mut self, conn: ConnId, id: u64, asked: &Asked) {
        let &Asked::Repair { extent, first, count, from: (source, boot, other) } = asked else {
            return;
        };
        let donor = self.net.donor_of(conn);
        let Some(who) = self.donors[donor].who(conn) else { return };
        let now_ms = self.net.now.as_millis() as u64;
        let is_silent = !self.net.hears((donor, source), &mut self.dice);
        let states = self.donors[donor].verify(who, extent, (first, count), now_ms);
        let pages = states.and_then(|states| {
            let is_damaged = |state: &PageState| matches!(state, PageState::Damaged(_));
            let damaged = (first..).zip(states).filter(|(_, state)| is_damaged(state));
            let read = damaged.map(|(page, _)| {
                if is_silent {
                    return Err(Refusal::NoSource);
                }
                let run = page..page + 1;
                let read = self.donors[source].pages_for(who, boot, other, run, now_ms)?;
                Ok((page, read[0]))
            });
            read.collect::<Result<Vec<_>, Refusal>>()
        });
        match pages {
            Ok(pages) => {
                let at = self.net.now + Duration::from_micros(self.dice.below(60_000));
                self.net.schedule(at, Event::Mended { conn, id, extent, pages });
            }
            Err(refusal) => self.answer_fill(conn, id, Err(refusal)),
        }
    }

    pub(crate) fn answer_fill(&mut self, conn: ConnId, id: u64, filled: Result<(), Refusal>) {
        let donor = self.net.donor_of(conn);
        let answered = match filled {
            Ok(()) => Answered::Done,
            Err(refusal) => Answered::Refused(refusal),
        };
        let Some(who) = self.donors[donor].who(conn) else { return };
        let load = self.donors[donor].load(who.space);
        let answer = ToBorrower::Answer { id, answered, load, data: Vec::new() };
        self.net.send_to_borrower(conn, answer, &mut self.dice);
    }

    pub(crate) fn drain_a_donor(&mut self) {
        let donor = self.dice.below(self.donors.len() as u64) as usize;
        self.donors[donor].draining = !self.donors[donor].draining;
        self.tally.drains += 1;
    }

    pub(crate) fn set_limit(&mut self, donor: usize, pages: u64) {
        let now_ms = self.net.now.as_millis() as u64;
        self.donors[donor].set_limit(pages, now_ms);
    }

    pub(crate) fn recall_at_a_donor(&mut self) {
        let donor = self.dice.below(self.donors.len() as u64) as usize;
        let pages = self.donors[donor].pages();
        let limit = if self.dice.below(2) == 0 { pages } else { self.dice.below(pages) };
        self.set_limit(donor, limit);
        self.tally.recalls += 1;
    }

    /// Programs of a donor's host take memory, or end.
    pub(crate) fn change_a_host(&mut self) {
        let donor = self.dice.below(self.donors.len() as u64) as usize;
        let pages = self.donors[donor].pages();
        let is_ample = self.dice.below(2) == 0;
        let host_pages = if is_ample { u64::MAX } else { self.dice.below(2 * pages) };
        self.donors[donor].host_pages = host_pages;
        self.tally.hosts_changed += 1;
    }

    /// Changes how many pages a donor's disk takes: more, fewer, or no more.
    pub(crate) fn change_a_disk(&mut self) {
        let donor = self.dice.below(self.donors.len() as u64) as usize;
        let pages = self.donors[donor].pages();
        let is_full = self.dice.below(3) == 0;
        self.donors[donor].disk_pages = if is_full { 0 } else { self.dice.below(2 * pages) };
    }

    pub(crate) fn silence_a_donor(&mut self) {
        let donor = self.dice.below(self.donors.len() as u64) as usize;
        let time = Duration::from_millis(self.dice.below(5000));
        let cut = match self.conditions.cuts_one_way {
            false => Cut::Both,
            true if time.as_millis().is_multiple_of(2) => Cut::Deaf,
            true => Cut::Mute,
        };
        self.net.cut_off(donor, cut, time);
    }

    /// A donor dies, and comes back empty. Returns the donor and the segments that it held.
    pub(crate) fn restart_a_donor(&mut self) -> (usize, Vec<(SpaceId, u64)>) {
        let donor = self.dice.below(self.donors.len() as u64) as usize;
        let extents = self.donors[donor].table.extents();
        let held = extents.map(|lent| (lent.space, lent.segment)).collect();
        self.boots += 1;
        self.tally.restarts += 1;
        self.net.sever_all(donor, &mut self.dice);
        let now_ms = self.net.now.as_millis() as u64;
        self.donors[donor].restart(self.boots, now_ms);
        (donor, held)
    }

    /// The donor that holds a borrower's extent.
    pub(crate) fn at(&self, borrower: &Borrower, place: Place) -> &Donor {
        &self.donors[borrower.number_of(place.donor)]
    }

    /// The donor that holds a borrower's extent, mutable.
    pub(crate) fn at_mut(&mut self, borrower: &Borrower, place: Place) -> &mut Donor {
        &mut self.donors[borrower.number_of(place.donor)]
    }

    /// Whether its donor still holds the extent.
    pub(crate) fn is_there(&self, borrower: &Borrower, place: Place) -> bool {
        let donor = self.at(borrower, place);
        donor.boot == place.boot && donor.has_extent(place.extent)
    }

    /// Whether a donor still holds any whole member of a group.
    pub(crate) fn is_any_there(&self, borrower: &Borrower, group: Group) -> bool {
        group.whole().any(|place| self.is_there(borrower, place))
    }
}
