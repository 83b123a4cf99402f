//! Checks whether the copies of a segment still are what was stored.
//!
//! Memory that nobody reads goes bad unseen, and a second copy does not help if both are bad. So
//! each member of a group is asked, run by run, for the state of its pages. Its donor computes
//! their sums anew, so no page moves.
//!
//! Decisions only: [`Inspection`] says whom to ask next, and is told the answers. It finds:
//!
//! - *A page that does not match its donor's sum for it.* Its donor repairs it from a member whose
//!   page matches the same sum. The donor checks again before it stores, and blocks writes
//!   meanwhile, so no newer page is overwritten.
//! - *A page that matches its sum and is not what was stored*: the sum has gone bad, or a write was
//!   lost. Only the owner of the pages can tell. Mostly a write is in flight. So a member is wrong
//!   only if the owner knew the same sum before and after the second question, and another member
//!   has it. A wrong member is removed and made anew, like one that missed a write. But first, the
//!   member that stays must prove right from end to end.
//! - *A page that is right nowhere.* It is lost. Its sum tells whoever reads it.

use crate::map::Map;
use crate::map::group::{DonorIndex, MAX_MEMBERS, Place};
use hecaton_memory::{PageNo, PageSum};
use hecaton_transport::protocol::PageState;

/// Most pages of a run that are asked about once more. The rest is left to the next round.
const MAX_SUSPECTS: usize = 256;

/// Knowledge of the pages' owner: the sum of a stored page, if certain and no write is in flight.
pub type Known<'a> = &'a dyn Fn(PageNo) -> Option<PageSum>;

/// How far a round has come.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cursor {
    segment: u64,
    first: u32,
}

impl Cursor {
    /// The next run to inspect, of at most `run_pages` pages. `None` at the end of a round; the
    /// next one begins after that.
    ///
    /// Skips segments that have no two whole members at reachable donors: nothing can be compared.
    pub fn next(&mut self, map: &Map, run_pages: u32) -> Option<Run> {
        loop {
            let Some((segment, members, is_all)) = map.next_to_compare(self.segment) else {
                *self = Cursor::default();
                return None;
            };
            if segment != self.segment {
                *self = Cursor { segment, first: 0 };
            }
            let left = (map.segment_pages() as u32).saturating_sub(self.first);
            if left == 0 {
                *self = Cursor { segment: segment + 1, first: 0 };
                continue;
            }
            let run = Run {
                segment,
                first: self.first,
                count: left.min(run_pages),
                members,
                is_all,
                heir: None,
            };
            self.first += run.count;
            return Some(run);
        }
    }
}

/// Some pages of a segment, and the members that are to be compared.
#[derive(Clone, Debug)]
pub struct Run {
    /// The segment.
    pub segment: u64,
    /// The first page, in the segment.
    pub first: u32,
    /// How many pages.
    pub count: u32,
    /// At least two.
    pub members: Vec<Place>,
    /// Whether there are no other whole members, whose donors cannot be asked at present.
    pub is_all: bool,
    /// Member to ask before all others; it suffices if it has all pages sound.
    pub heir: Option<Place>,
}

impl Run {
    /// The run as compared before a member leaves. If a staying member has all pages sound, the
    /// leaving one has nothing unique.
    pub fn before_leaving(self, leaving: Place) -> Run {
        let heir = self.members.iter().copied().find(|place| *place != leaving);
        Run { heir, ..self }
    }
}

impl Map {
    /// The next segment with several whole members at reachable donors, these members, and whether
    /// they are all of its whole members.
    fn next_to_compare(&self, from: u64) -> Option<(u64, Vec<Place>, bool)> {
        self.holdings_from(from).find_map(|(segment, held)| {
            let can_be_asked = |place: &Place| self.donor(place.donor).reachable;
            let members: Vec<Place> = held.group.whole().filter(can_be_asked).collect();
            let is_all = members.len() == held.group.whole().count();
            (members.len() > 1).then_some((segment, members, is_all))
        })
    }

    /// Some pages of a segment that are to be inspected out of turn. None, if there is nothing to
    /// compare.
    pub fn run_to_compare(&self, segment: u64, first: u32, run_pages: u32) -> Option<Run> {
        let (found, members, is_all) = self.next_to_compare(segment)?;
        let count = (self.segment_pages() as u32).saturating_sub(first).min(run_pages);
        let run = Run { segment, first, count, members, is_all, heir: None };
        (found == segment && count > 0).then_some(run)
    }

    /// The part of a report that still holds when the inspection is over. A member that has left
    /// the group meanwhile got no writes since, and a new member was not asked.
    pub fn uphold(&self, inspection: &Inspection, report: Report) -> Report {
        let group = self.holding(inspection.segment()).map(|held| held.group);
        let whole: Vec<Place> = group.iter().flat_map(|group| group.whole()).collect();
        let asked = &inspection.run.members;
        let are_members = asked.iter().all(|place| whole.contains(place));
        let are_all = are_members && whole.len() == asked.len();
        Report {
            lost: if are_all { report.lost } else { 0 },
            wrong: report.wrong.filter(|_| are_members),
            ..report
        }
    }
}

/// Next step of an inspection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Ask for the states of a run, then call [`Inspection::verified`] or [`Inspection::failed`].
    Verify {
        /// The member.
        place: Place,
        /// First page of the run.
        first: u32,
        /// Pages in the run.
        count: u32,
    },
    /// Have damaged pages repaired, then call [`Inspection::mended`] or [`Inspection::failed`].
    Repair {
        /// The member that has them.
        to: Place,
        /// The member that has them sound.
        from: Place,
        /// First page of the run.
        first: u32,
        /// Pages in the run.
        count: u32,
    },
    /// Nothing more: this was found, as far as [`Map::uphold`] lets it stand.
    Over(Report),
}

/// Result of an inspection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Pages that were looked at, at all members together.
    pub pages: u64,
    /// Pages that were found damaged, at all members together.
    pub damaged: u64,
    /// Damaged pages that are sound again.
    pub repaired: u64,
    /// Pages of the run that no member has as they were stored.
    pub lost: u64,
    /// A member that has something else than what was stored. It must be given up.
    pub wrong: Option<Place>,
    /// A member did not answer, or would not.
    pub is_cut_short: bool,
}

/// Damaged pages of one member that another one has sound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mending {
    to: Place,
    from: Place,
    first: u32,
    count: u32,
}

/// A page that some member does not have right, with the sum that its owner knew before the members
/// were asked again.
#[derive(Clone, Copy, Debug)]
struct Suspect {
    page: u32,
    known: PageSum,
}

#[derive(Debug)]
enum Stage {
    /// Each member is asked for the run, the heir first, if there is one.
    Comparing,
    /// Damaged pages are mended, the last of the list first.
    Mending {
        left: Vec<Mending>,
        looking_again: bool,
    },
    /// Members are asked again for pages that some of them do not have right.
    Doubting {
        suspects: Vec<Suspect>,
    },
    /// One member was found to be wrong. The one that is to stay is looked at from end to end, with
    /// what its owner knew before.
    Trusting {
        wrong: Place,
        heir: Place,
        from: u32,
        before: Vec<Option<PageSum>>,
    },
    Over,
}

/// One run of pages, compared between the members of its group.
#[derive(Debug)]
pub struct Inspection {
    run: Run,
    segment_pages: u64,
    /// The sum of a page of zeros, which one that was never written stands for.
    zero_sum: PageSum,
    stage: Stage,
    /// Members that have answered in this stage, with what they said.
    heard: Vec<(Place, Vec<PageState>)>,
    report: Report,
}

impl Inspection {
    /// Begins to inspect a run. `segment_pages` is the size of a segment, in pages.
    pub fn new(run: Run, segment_pages: u64, zero_sum: PageSum) -> Inspection {
        let (heard, report) = (Vec::with_capacity(MAX_MEMBERS), Report::default());
        Inspection { run, segment_pages, zero_sum, stage: Stage::Comparing, heard, report }
    }

    /// The segment.
    pub fn segment(&self) -> u64 {
        self.run.segment
    }

    /// Next step; `known` asks the pages' owner.
    pub fn next(&mut self, known: Known<'_>) -> Ask {
        loop {
            match &self.stage {
                Stage::Comparing => match self.next_member() {
                    Some(place) => {
                        let Run { first, count, .. } = self.run;
                        return Ask::Verify { place, first, count };
                    }
                    None => self.compare(),
                },
                Stage::Mending { left, looking_again } => match left.last() {
                    Some(&Mending { to, first, count, .. }) if *looking_again => {
                        return Ask::Verify { place: to, first, count };
                    }
                    Some(&Mending { to, from, first, count }) => {
                        return Ask::Repair { to, from, first, count };
                    }
                    None => self.doubt(known),
                },
                Stage::Doubting { suspects } => match (self.next_member(), suspects.first()) {
                    (Some(place), Some(suspect)) => {
                        let first = suspect.page;
                        let last = suspects.last().map_or(first, |suspect| suspect.page);
                        return Ask::Verify { place, first, count: last + 1 - first };
                    }
                    _ => self.judge(known),
                },
                Stage::Trusting { .. } => match self.trust(known) {
                    Some(ask) => return ask,
                    None => self.stage = Stage::Over,
                },
                Stage::Over => return Ask::Over(self.report),
            }
        }
    }

    /// The member was asked, and this is the state of the pages.
    pub fn verified(&mut self, place: Place, states: &[PageState]) {
        self.report.pages += states.len() as u64;
        match &mut self.stage {
            Stage::Comparing if self.run.heir == Some(place) && !states.iter().any(is_damaged) => {
                self.stage = Stage::Over;
            }
            Stage::Comparing | Stage::Doubting { .. } | Stage::Trusting { .. } => {
                self.heard.push((place, states.to_vec()));
            }
            Stage::Mending { left, looking_again } => {
                *looking_again = false;
                let Some(Mending { to, first, count, .. }) = left.pop() else { return };
                let still = states.iter().filter(|state| is_damaged(state)).count() as u64;
                self.report.repaired += u64::from(count).saturating_sub(still);
                if let Some((_, heard)) = self.heard.iter_mut().find(|(place, _)| *place == to) {
                    let at = (first - self.run.first) as usize;
                    heard[at..at + states.len()].copy_from_slice(states);
                }
            }
            Stage::Over => {}
        }
    }

    /// The member has mended what it could.
    pub fn mended(&mut self) {
        if let Stage::Mending { looking_again, .. } = &mut self.stage {
            *looking_again = true;
        }
    }

    /// The donor did not answer, or would not: the rest is left to the next round.
    pub fn failed(&mut self, donor: DonorIndex) {
        self.run.is_all = false;
        self.report.is_cut_short = true;
        self.run.members.retain(|place| place.donor != donor);
        self.run.heir = self.run.heir.filter(|place| place.donor != donor);
        self.heard.retain(|(place, _)| place.donor != donor);
        let is_over = match &mut self.stage {
            Stage::Mending { left, looking_again } => {
                left.retain(|mending| mending.to.donor != donor);
                *looking_again = false;
                false
            }
            Stage::Comparing | Stage::Doubting { .. } => self.run.members.len() < 2,
            Stage::Trusting { .. } | Stage::Over => true,
        };
        if is_over {
            self.stage = Stage::Over;
        }
    }

    fn next_member(&self) -> Option<Place> {
        let is_heard = |place: &Place| self.heard.iter().any(|(heard, _)| heard == place);
        let others = self.run.members.iter().copied();
        self.run.heir.into_iter().chain(others).find(|place| !is_heard(place))
    }

    /// Whether a page is sound and has that sum.
    fn is_right(&self, state: PageState, sum: PageSum) -> bool {
        match state {
            PageState::Unwritten => sum == self.zero_sum,
            PageState::Sound(found) => sum == found,
            PageState::Damaged(_) => false,
        }
    }

    /// All members were heard: what is damaged at one and sound at another?
    fn compare(&mut self) {
        let mut left: Vec<Mending> = Vec::new();
        for (to, states) in &self.heard {
            for (at, state) in states.iter().enumerate() {
                let PageState::Damaged(sum) = *state else { continue };
                self.report.damaged += 1;
                let is_right =
                    |(_, states): &&(Place, Vec<PageState>)| self.is_right(states[at], sum);
                let Some((from, _)) = self.heard.iter().find(is_right) else { continue };
                let page = self.run.first + at as u32;
                match left.last_mut() {
                    Some(last)
                        if (last.to, last.from) == (*to, *from)
                            && last.first + last.count == page =>
                    {
                        last.count += 1;
                    }
                    _ => left.push(Mending { to: *to, from: *from, first: page, count: 1 }),
                }
            }
        }
        self.stage = Stage::Mending { left, looking_again: false };
    }

    /// Which pages are at some member not what their owner knows to be stored?
    fn doubt(&mut self, known: Known<'_>) {
        let pages = (0..self.run.count).filter_map(|at| {
            let page = self.run.first + at;
            let known = known(self.page_no(page))?;
            let is_wrong =
                |(_, states): &(Place, Vec<PageState>)| !self.is_right(states[at as usize], known);
            self.heard.iter().any(is_wrong).then_some(Suspect { page, known })
        });
        let suspects: Vec<Suspect> = pages.take(MAX_SUSPECTS).collect();
        self.stage = match suspects.is_empty() {
            true => Stage::Over,
            false => Stage::Doubting { suspects },
        };
        self.heard.clear();
    }

    /// All members were asked again: which one is wrong about a page whose contents are certain?
    fn judge(&mut self, known: Known<'_>) {
        let Stage::Doubting { suspects } = std::mem::replace(&mut self.stage, Stage::Over) else {
            return;
        };
        let Some(first) = suspects.first().map(|suspect| suspect.page) else { return };
        let mut accused = None;
        for Suspect { page, known: before } in suspects {
            if known(self.page_no(page)) != Some(before) {
                continue;
            }
            let at = (page - first) as usize;
            let right = self.heard.iter().find(|(_, states)| self.is_right(states[at], before));
            // A page that is only damaged can be repaired in the next round.
            let wrong = self.heard.iter().find(|(_, states)| {
                !self.is_right(states[at], before) && states[at] != PageState::Damaged(before)
            });
            match (right, wrong) {
                (Some((heir, _)), Some((wrong, _))) => accused = accused.or(Some((*wrong, *heir))),
                (Some(_), None) => {}
                (None, _) => self.report.lost += u64::from(self.run.is_all),
            }
        }
        self.heard.clear();
        if let Some((wrong, heir)) = accused {
            self.stage = Stage::Trusting { wrong, heir, from: 0, before: Vec::new() };
        }
    }

    /// Asks the staying member for its next pages. None once all of them are right, or one is
    /// wrong.
    fn trust(&mut self, known: Known<'_>) -> Option<Ask> {
        let run = self.run.segment * self.segment_pages;
        let Stage::Trusting { wrong, heir, mut from, before } =
            std::mem::replace(&mut self.stage, Stage::Over)
        else {
            return None;
        };
        if let Some((_, states)) = self.heard.pop() {
            for ((at, state), before) in (from..).zip(states).zip(before) {
                let is_certain = before.is_some() && known(run + u64::from(at)) == before;
                // The accused member may have the only right copy of this page, so it stays.
                if is_certain && before.is_some_and(|sum| !self.is_right(state, sum)) {
                    return None;
                }
                from = at + 1;
            }
        }
        let left = self.segment_pages as u32 - from;
        if left == 0 {
            self.report.wrong = Some(wrong);
            return None;
        }
        let count = left.min(self.run.count);
        let before = (from..from + count).map(|page| known(run + u64::from(page))).collect();
        self.stage = Stage::Trusting { wrong, heir, from, before };
        Some(Ask::Verify { place: heir, first: from, count })
    }

    fn page_no(&self, page: u32) -> PageNo {
        self.run.segment * self.segment_pages + u64::from(page)
    }
}

fn is_damaged(state: &PageState) -> bool {
    matches!(state, PageState::Damaged(_))
}

#[cfg(test)]
mod tests {
    use super::*;
    use PageState::{Damaged, Sound, Unwritten};
    use hecaton_memory::{ExtentId, ZERO_PAGE_SUM};
    use std::cell::Cell;
    use std::collections::BTreeMap;

    const PAGES: u32 = 8;
    const ALIKE: [PageState; PAGES as usize] = [Sound(1); PAGES as usize];

    fn place(donor: u32) -> Place {
        Place { donor: DonorIndex(donor), boot: 1, extent: ExtentId(7) }
    }

    fn run(donors: impl IntoIterator<Item = u32>) -> Run {
        let members = donors.into_iter().map(place).collect();
        Run { segment: 5, first: 0, count: PAGES / 2, members, is_all: true, heir: None }
    }

    fn inspection(run: Run) -> Inspection {
        Inspection::new(run, PAGES.into(), ZERO_PAGE_SUM)
    }

    /// Members that answer as they are, and mend as a donor does.
    struct Members(BTreeMap<u32, Vec<PageState>>);

    impl Members {
        fn new(members: &[[PageState; PAGES as usize]]) -> Members {
            Members((0..).zip(members.iter().map(|states| states.to_vec())).collect())
        }

        fn at(&self, donor: u32, page: usize) -> PageState {
            self.0[&donor][page]
        }

        /// Inspects pages 0 to 3, with `between` done before each question.
        fn inspect(&mut self, known: Known<'_>, between: impl FnMut(&mut Members, Ask)) -> Report {
            self.inspect_run(run(self.0.keys().copied()), known, between)
        }

        fn inspect_run(
            &mut self,
            run: Run,
            known: Known<'_>,
            mut between: impl FnMut(&mut Members, Ask),
        ) -> Report {
            let mut inspection = inspection(run);
            for _ in 0..100 {
                let ask = inspection.next(known);
                between(self, ask);
                match ask {
                    Ask::Verify { place, first, count } => {
                        let states = &self.0[&place.donor.0];
                        inspection.verified(place, &states[first as usize..][..count as usize]);
                    }
                    Ask::Repair { to, from, first, count } => {
                        for page in first as usize..(first + count) as usize {
                            let right = self.at(from.donor.0, page);
                            let here = &mut self.0.get_mut(&to.donor.0).unwrap()[page];
                            if let (Damaged(sum), Sound(other)) = (*here, right)
                                && sum == other
                            {
                                *here = right;
                            }
                        }
                        inspection.mended();
                    }
                    Ask::Over(report) => return report,
                }
            }
            panic!("never over");
        }
    }

    const NOTHING: Known<'static> = &|_| None;

    #[test]
    fn members_that_are_right_are_asked_once_each() {
        let mut states = ALIKE;
        states[1] = Unwritten;
        let mut others = states;
        others[1] = Sound(ZERO_PAGE_SUM);
        let known = |page| Some(if page % u64::from(PAGES) == 1 { ZERO_PAGE_SUM } else { 1 });
        let report = Members::new(&[states, others]).inspect(&known, |_, _| {});
        assert_eq!(report, Report { pages: 8, ..Report::default() });
    }

    #[test]
    fn each_member_mends_the_other() {
        let sound = [1, 2, 3, 4, 5, 6, 7, 8].map(Sound);
        let (mut a, mut b) = (sound, sound);
        (a[0], a[1], b[3]) = (Damaged(1), Damaged(2), Damaged(4));
        let mut members = Members::new(&[a, b]);
        let report = members.inspect(&|page| Some(page as u32 % PAGES + 1), |_, _| {});
        let expected = Report { pages: 11, damaged: 3, repaired: 3, ..Report::default() };
        assert_eq!(report, expected, "what was mended is looked at once more, and no more");
        assert_eq!(members.0[&0], sound);
        assert_eq!(members.0[&1], sound);
    }

    #[test]
    fn before_one_leaves_a_sound_one_that_stays_is_enough() {
        let leaving = |donor| run([0, 1, 2]).before_leaving(place(donor));
        let mut damaged = ALIKE;
        damaged[3] = Damaged(1);
        // The one that leaves is not asked, whatever it has.
        let mut members = Members::new(&[damaged, ALIKE, ALIKE]);
        let report = members.inspect_run(leaving(0), NOTHING, |members, _| {
            members.0.remove(&0);
            members.0.remove(&2);
        });
        assert_eq!(report, Report { pages: 4, ..Report::default() });
        // A member that stays is repaired, from the leaving one if necessary.
        let mut members = Members::new(&[damaged, damaged, ALIKE]);
        let report = members.inspect_run(leaving(2), NOTHING, |_, _| {});
        assert_eq!((report.damaged, report.repaired), (2, 2));
        assert_eq!(members.0[&0], ALIKE);
        assert_eq!(members.0[&1], ALIKE);
        // It does not answer: nothing is known of it.
        let mut inspection = inspection(leaving(0));
        assert!(
            matches!(inspection.next(NOTHING), Ask::Verify { place, .. } if place.donor.0 == 1)
        );
        inspection.failed(DonorIndex(1));
        inspection.verified(place(0), &ALIKE[..4]);
        inspection.verified(place(2), &ALIKE[..4]);
        let Ask::Over(report) = inspection.next(NOTHING) else { panic!("not over") };
        assert!(report.is_cut_short);
    }

    #[test]
    fn what_is_damaged_everywhere_is_lost_if_it_is_wanted_and_all_were_asked() {
        let mut states = ALIKE;
        states[2] = Damaged(1);
        let report = Members::new(&[states, states]).inspect(&|_| Some(1), |_, _| {});
        assert_eq!((report.damaged, report.repaired, report.lost), (2, 0, 1));
        assert_eq!(report.wrong, None);
        let report = Members::new(&[states, states]).inspect(NOTHING, |_, _| {});
        assert_eq!((report.damaged, report.lost), (2, 0));
        // It is written meanwhile.
        let mut asked = 0;
        let report = Members::new(&[states, states]).inspect(&|_| Some(1), |members, _| {
            asked += 1;
            if asked == 3 {
                members.0.values_mut().for_each(|states| states[2] = Sound(1));
            }
        });
        assert_eq!(report.lost, 0);
        // There is another member, which does not answer.
        let mut members = Members::new(&[states, states]);
        members.0.insert(2, ALIKE.to_vec());
        let mut inspection = inspection(run([0, 1, 2]));
        inspection.failed(DonorIndex(2));
        for donor in [0, 1] {
            inspection.verified(place(donor), &members.0[&donor][..4]);
        }
        while let Ask::Verify { place, first, count } = inspection.next(&|_| Some(1)) {
            let states = &members.0[&place.donor.0][first as usize..][..count as usize];
            inspection.verified(place, states);
        }
        let Ask::Over(report) = inspection.next(&|_| Some(1)) else { panic!("not over") };
        assert_eq!(report.lost, 0);
    }

    #[test]
    fn a_write_under_way_is_no_fault_of_anybody() {
        let mut after = ALIKE;
        after[1] = Sound(2);
        // Its owner does not know what is stored while it writes.
        let known = |page| (page % u64::from(PAGES) != 1).then_some(1);
        let report = Members::new(&[ALIKE, after]).inspect(&known, |_, _| {});
        assert_eq!(report, Report { pages: 8, ..Report::default() });
        // It is done by the time that they are asked again.
        let known = |page| Some(if page % u64::from(PAGES) == 1 { 2 } else { 1 });
        let mut asked = 0;
        let report = Members::new(&[ALIKE, after]).inspect(&known, |members, _| {
            asked += 1;
            if asked == 3 {
                members.0.insert(0, after.to_vec());
            }
        });
        assert_eq!((report.wrong, report.lost), (None, 0));
        // It begins in between.
        let calls = Cell::new(0);
        let known = |page| {
            (page % u64::from(PAGES) == 1).then(|| {
                calls.set(calls.get() + 1);
                if calls.get() == 1 { 2 } else { 3 }
            })
        };
        let report = Members::new(&[ALIKE, after]).inspect(&known, |_, _| {});
        assert_eq!((report.wrong, report.lost, calls.get()), (None, 0, 2));
    }

    #[test]
    fn who_has_something_else_than_what_was_stored_is_wrong() {
        let mut missed = ALIKE;
        missed[3] = Unwritten;
        for (states, wrong) in [([missed, ALIKE], 0), ([ALIKE, missed], 1)] {
            let report = Members::new(&states).inspect(&|_| Some(1), |_, _| {});
            assert_eq!((report.wrong, report.lost), (Some(place(wrong)), 0));
        }
        // All have the same, and it is not what was stored.
        let report = Members::new(&[missed, missed]).inspect(&|_| Some(1), |_, _| {});
        assert_eq!((report.wrong, report.lost), (None, 1));
    }

    #[test]
    fn nobody_is_given_up_for_one_that_is_not_right_elsewhere() {
        let mut missed = ALIKE;
        missed[0] = Unwritten;
        for bad in [Damaged(1), Sound(2), Unwritten] {
            let mut heir = ALIKE;
            heir[7] = bad;
            let report = Members::new(&[missed, heir]).inspect(&|_| Some(1), |_, _| {});
            assert_eq!(report.wrong, None, "page 7 is right there alone");
            // Nobody wants that page, or it is being written.
            let known = |page| (page % u64::from(PAGES) != 7).then_some(1);
            let report = Members::new(&[missed, heir]).inspect(&known, |_, _| {});
            assert_eq!(report.wrong, Some(place(0)));
        }
    }

    #[test]
    fn a_sum_that_has_gone_bad_is_found_as_a_page_is() {
        let mut other = ALIKE;
        other[2] = Damaged(77);
        let report = Members::new(&[ALIKE, other]).inspect(&|_| Some(1), |_, _| {});
        assert_eq!((report.damaged, report.repaired), (1, 0), "it is not the same contents");
        assert_eq!(report.wrong, Some(place(1)));
    }

    #[test]
    fn a_donor_that_says_nothing_leaves_the_rest_to_the_next_round() {
        let mut first = inspection(run([0, 1]));
        assert!(matches!(first.next(NOTHING), Ask::Verify { .. }));
        first.failed(DonorIndex(0));
        let cut_short = Report { is_cut_short: true, ..Report::default() };
        assert_eq!(first.next(NOTHING), Ask::Over(cut_short));
        let mut inspection = inspection(run([0, 1]));
        inspection.verified(place(0), &[Damaged(1); 4]);
        inspection.verified(place(1), &[Sound(1); 4]);
        assert!(matches!(inspection.next(NOTHING), Ask::Repair { count: 4, .. }));
        inspection.failed(DonorIndex(0));
        let Ask::Over(report) = inspection.next(NOTHING) else { panic!("not over") };
        assert_eq!((report.damaged, report.repaired), (4, 0));
    }

    #[test]
    fn a_round_passes_all_segments_that_have_copies() {
        use crate::map::lookup::Whereabouts;
        use crate::map::{Shape, Take};
        use hecaton_memory::Epoch;
        use hecaton_policy::site::Site;
        use hecaton_transport::protocol::Load;
        use std::time::Duration;
        let shape = Shape { segments: 9, segment_pages: 8, copies: 2, epoch: Epoch(1), code: None };
        let mut map = Map::new(shape);
        let load = Load { free_pages: 999, ..Load::default() };
        for (name, boot) in [("a", 1), ("b", 2)] {
            let donor = map.donor_named(name, &Site::unplaced(name), false);
            assert!(map.heard(donor, boot, load, Duration::ZERO, Duration::ZERO));
        }
        for segment in [2, 6] {
            let mut take = map.begin(segment);
            while let Take::Ask(donor, _) = take {
                let boot = map.donor(donor).boot.unwrap();
                take = map.allocated(segment, Place { donor, boot, extent: ExtentId(segment) });
            }
        }
        let mut cursor = Cursor::default();
        let mut round = |map: &Map| {
            let runs = std::iter::from_fn(|| cursor.next(map, 5));
            runs.map(|run| (run.segment, run.first, run.count)).collect::<Vec<_>>()
        };
        let all = [(2, 0, 5), (2, 5, 3), (6, 0, 5), (6, 5, 3)];
        assert_eq!(round(&map), all);
        assert_eq!(round(&map), all, "the next round is as the first");

        // A member that has left is no longer accused, and nothing is lost for its sake.
        let compared = inspection(cursor.next(&map, 5).unwrap());
        let Whereabouts::Held(group) = map.whereabouts(2) else { panic!("not there") };
        let members: Vec<Place> = group.whole().collect();
        let report = Report { lost: 3, wrong: Some(members[0]), ..Report::default() };
        assert_eq!(map.uphold(&compared, report), report);
        assert!(map.desert(2, members[0]));
        assert_eq!(map.uphold(&compared, report), Report::default());
        let mut round = |map: &Map| std::iter::from_fn(|| cursor.next(map, 5)).count();
        assert_eq!(round(&map), 2, "the segment with one copy is passed over");
        map.silent(DonorIndex(0));
        assert_eq!(round(&map), 0, "there is nobody to compare with");
    }
}
