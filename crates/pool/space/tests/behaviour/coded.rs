//! Cold memory that is coded, on real donors over real sockets: as many donors may be lost as there
//! are parities, a successor finds all of it, and what is written is kept in copies again.

use crate::common::*;
use hecaton_memory::{Epoch, Generation, PageSum, page_sum};
use hecaton_space::code::FIRST_PARITY;
use hecaton_space::{
    Coded, Cold, Expected, Lane, Record, Redundancy, ScrubStatus, Space, SpaceConfig, SpaceError,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

const SEGMENTS: u64 = 4;
const TURN: u64 = 3;

/// Record of coded stripes, as a pager keeps it for its successor.
#[derive(Clone, Default)]
struct Kept(Arc<Mutex<BTreeMap<u64, Coded>>>);

impl Kept {
    fn all(&self) -> BTreeMap<u64, Coded> {
        self.0.lock().unwrap().clone()
    }
}

impl Record for Kept {
    fn note(&self, stripe: u64, coded: Option<Coded>) {
        let mut kept = self.0.lock().unwrap();
        match coded {
            Some(coded) => _ = kept.insert(stripe, coded),
            None => _ = kept.remove(&stripe),
        }
    }

    fn sum_of(&self, _: u64) -> Option<PageSum> {
        None
    }
}

fn coded_config() -> SpaceConfig {
    SpaceConfig {
        redundancy: Redundancy::Mirror(2),
        cold: Some(Cold { code: "4+2".parse().unwrap(), after: Duration::from_millis(100) }),
        ..config(SEGMENTS * SEGMENT_PAGES)
    }
}

fn donors() -> Vec<Lent> {
    ["a", "b", "c", "d", "e", "f"].map(|name| Lent::start(name, 8)).into()
}

/// All pages but some of each segment, which stay holes.
fn pages_of(segment: u64) -> Vec<u64> {
    let all = segment * SEGMENT_PAGES..(segment + 1) * SEGMENT_PAGES;
    all.filter(|page| page % 7 != segment).collect()
}

fn write_all(lane: &mut Lane) {
    (0..SEGMENTS).for_each(|segment| assert_written(lane, &pages_of(segment), TURN));
}

fn read_all(lane: &mut Lane) {
    (0..SEGMENTS).for_each(|segment| assert_reads(lane, &pages_of(segment), TURN));
    assert_zeros(lane, &[0]);
    assert_zeros(lane, &[SEGMENT_PAGES]);
}

fn is_coded(space: &Space) -> bool {
    let status = space.status();
    status.segments_coded == SEGMENTS && status.segments_untended == 0
}

/// A space with one stripe that is coded.
fn coded(donors: &[Lent]) -> (Arc<Space>, Lane, Kept) {
    let space = Space::create(coded_config(), cluster(&donors.iter().collect::<Vec<_>>())).unwrap();
    let kept = Kept::default();
    space.code_what_is_cold(Box::new(kept.clone()));
    let mut lane = space.lane().unwrap();
    write_all(&mut lane);
    tend_until(&space, "coded", is_coded);
    (space, lane, kept)
}

#[test]
fn two_donors_of_six_may_be_lost_at_once() {
    let mut donors = donors();
    let (space, mut lane, kept) = coded(&donors);
    let status = space.status();
    let extents: Vec<u64> = status.donors.iter().map(|donor| donor.extents).collect();
    assert_eq!(extents, [1; 6], "no two shards are at one donor");
    let segment_bytes = SEGMENT_PAGES * 4096;
    assert_eq!(status.bytes_saved, 2 * segment_bytes);
    assert_eq!(kept.all().len(), 1);
    let lent: u64 = donors.iter().map(|d| d.donor.snapshot()).map(|s| s.pages - s.free_pages).sum();
    assert_eq!(lent, 6 * SEGMENT_PAGES, "the other copies have gone back");
    read_all(&mut lane);
    donors[1].stop();
    donors[4].stop();
    read_all(&mut lane);
    let _ = space.release();
}

#[test]
fn lost_shards_are_worked_out_at_other_donors() {
    let mut donors = donors();
    let (space, mut lane, _) = coded(&donors);
    // They come back with nothing.
    for lost in [0, 3] {
        let address = donors[lost].stop();
        let name = donors[lost].name.clone();
        donors[lost] = Lent::start_at(&name, 8, address);
    }
    tend_until(&space, "whole again", |space| {
        let have_some = [0, 3].iter().all(|at: &usize| !donors[*at].is_all_free());
        have_some && is_whole(space) && is_coded(space)
    });
    let extents: Vec<u64> = space.status().donors.iter().map(|donor| donor.extents).collect();
    assert_eq!(extents, [1; 6]);
    donors[1].stop();
    donors[2].stop();
    read_all(&mut lane);
    let _ = space.release();
}

#[test]
fn what_is_written_is_kept_in_copies_again() {
    let donors = donors();
    let (space, mut lane, kept) = coded(&donors);
    let refused = write(&mut lane, &pages_of(2), 9);
    assert!(
        matches!(refused, Outcome::Failed(SpaceError::Coded { segment: 2, .. })),
        "{refused:?}"
    );
    assert!(matches!(space.discard(0, 1), Err(SpaceError::Coded { .. })));
    assert!(matches!(space.free_segment(1), Err(SpaceError::Coded { .. })));
    read_all(&mut lane);
    let is_plain = |space: &Space| space.status().segments_coded == 0 && is_whole(space);
    tend_until(&space, "in copies", is_plain);
    assert!(kept.all().is_empty());
    assert_written(&mut lane, &pages_of(2), 9);
    assert_reads(&mut lane, &pages_of(2), 9);
    assert_reads(&mut lane, &pages_of(1), TURN);
    space.free_segment(1).unwrap();
    // And is coded once more when it has been left alone.
    tend_until(&space, "coded", |space| space.status().segments_coded == SEGMENTS - 1);
    assert_reads(&mut lane, &pages_of(2), 9);
    space.release().unwrap();
    donors.iter().for_each(Lent::assert_all_comes_back);
}

#[test]
fn what_is_written_is_kept_in_copies_again_though_two_donors_are_gone() {
    let mut donors = donors();
    let (space, mut lane, kept) = coded(&donors);
    // They have not been asked for anything since: that they are away is found out on the way.
    donors[1].stop();
    donors[4].stop();
    let refused = write(&mut lane, &pages_of(2), 9);
    assert!(matches!(refused, Outcome::Failed(SpaceError::Coded { .. })), "{refused:?}");
    tend_until(&space, "plain", |space| space.status().segments_coded == 0);
    assert_eq!(kept.all().len(), 0);
    // A write finds out that a donor is away, and the next one goes to those that are there.
    write_until_stored(&mut lane, &pages_of(2), 9);
    assert_reads(&mut lane, &pages_of(2), 9);
    for segment in [0, 1, 3] {
        assert_reads(&mut lane, &pages_of(segment), TURN);
    }
    let _ = space.release();
}

#[test]
fn a_successor_finds_what_was_coded_though_two_donors_are_gone() {
    let mut donors = donors();
    let (space, lane, kept) = coded(&donors);
    drop((space, lane));
    let known = cluster(&donors.iter().collect::<Vec<_>>());
    donors[2].stop();
    donors[5].stop();
    let mut config = SpaceConfig { epoch: Epoch(2), ..coded_config() };
    let_be_silent_for(Duration::from_secs(3), &mut config);
    let expected = |segment| {
        let pages = pages_of(segment).len() as u32;
        (segment, Expected { pages, generation: Generation::first(Epoch(1)) })
    };
    let expected: BTreeMap<u64, Expected> = (0..SEGMENTS).map(expected).collect();
    let space = Space::adopt_coded(config, known, &expected, &kept.all()).unwrap();
    let mut lane = space.lane().unwrap();
    read_all(&mut lane);
    let _ = space.release();
}

#[test]
fn a_page_that_has_gone_bad_is_worked_out_from_others() {
    let donors = donors();
    let (space, mut lane, _) = coded(&donors);
    let page = pages_of(1)[5];
    lane.read(1, &[page]).unwrap();
    let mut giver = None;
    while giver.is_none() {
        lane.progress(Some(Duration::from_secs(5)), &mut |completion| match completion {
            hecaton_space::Completion::Read { giver: from, .. } => giver = from,
            other => panic!("{other:?}"),
        });
    }
    // As a reader does that knows another sum.
    lane.read_avoiding(7, &[page], &[giver.unwrap()]).unwrap();
    let Outcome::Read(data) = finish(&mut lane, 7, 1) else { panic!() };
    assert_eq!(data, content(page, TURN));
    space.release().unwrap();
}

/// Sums that a pager knows of its stored pages.
fn stored(page: u64) -> Option<PageSum> {
    let is_written = pages_of(page / SEGMENT_PAGES).contains(&page);
    is_written.then(|| page_sum(&content(page, TURN)))
}

/// Makes the donor of a shard store other contents for one of its pages.
fn alter(donors: &[Lent], space: &Space, shard: u64, page: u32) {
    let other = content(u64::from(page), 99);
    let held = donors.iter().filter(|lent| write_past(lent, space, shard, page, &other)).count();
    assert_eq!(held, 1, "shard {shard} is at one donor");
}

#[test]
fn coded_pages_that_go_bad_unread_are_mended() {
    let mut donors = donors();
    let (space, mut lane, _) = coded(&donors);
    let clean = scrub_once(&space, &stored);
    let bytes = 2 * 6 * SEGMENT_PAGES * 4096;
    assert_eq!(clean, ScrubStatus { bytes_verified: bytes, rounds: 1, ..ScrubStatus::default() });
    let parity = |at| FIRST_PARITY + at;
    // Altered pages: of segments and of parities; two in one row; zeros; and a page that nobody
    // names any more.
    let hole = (0..SEGMENT_PAGES).find(|page| stored(*page).is_none()).unwrap() as u32;
    let altered = [(1, 5), (parity(0), 9), (2, 20), (parity(1), 20), (0, 33), (3, 33), (0, hole)];
    for (shard, page) in altered {
        alter(&donors, &space, shard, page);
    }
    let page = 3 * SEGMENT_PAGES + 40;
    let donor = donors
        .iter()
        .find(|lent| past(lent, &space).1.iter().any(|line| line.segment == page / SEGMENT_PAGES));
    damage(donor.unwrap(), &[page], TURN);
    let status = scrub_once(&space, &stored);
    assert_eq!((status.pages_repaired, status.pages_lost), (8, 0));
    assert_eq!(scrub_once(&space, &stored).pages_repaired, 8, "it is done");
    read_all(&mut lane);
    for lost in [0, 1] {
        donors[lost].stop();
    }
    read_all(&mut lane);
    let _ = space.release();
}

/// The stripe is to be written, and with its parities would go what its pages are mended from.
#[test]
fn what_has_gone_bad_in_a_stripe_is_mended_before_it_is_plain() {
    let donors = donors();
    let (space, mut lane, kept) = coded(&donors);
    let pages = [SEGMENT_PAGES + 5, 3 * SEGMENT_PAGES + 40];
    for page in pages {
        let holds = |lent: &&Lent| {
            past(lent, &space).1.iter().any(|line| line.segment == page / SEGMENT_PAGES)
        };
        damage(donors.iter().find(holds).unwrap(), &[page], TURN);
    }
    let refused = write(&mut lane, &pages_of(2), 9);
    assert!(matches!(refused, Outcome::Failed(SpaceError::Coded { .. })), "{refused:?}");
    let is_plain = |space: &Space| space.status().segments_coded == 0 && is_whole(space);
    tend_until(&space, "in copies", is_plain);
    assert!(kept.all().is_empty());
    for _ in 0..20 {
        pages.iter().for_each(|page| assert_reads(&mut lane, &[*page], TURN));
    }
    space.release().unwrap();
}

#[test]
fn a_coded_page_that_came_back_wrong_is_mended_out_of_turn() {
    let donors = donors();
    let (space, _lane, _) = coded(&donors);
    alter(&donors, &space, 1, 5);
    space.suspect(SEGMENT_PAGES + 5);
    space.scrub_suspects(&stored);
    assert_eq!(space.status().scrub.pages_repaired, 1);
    space.release().unwrap();
}

#[test]
fn coded_pages_that_cannot_be_worked_out_are_lost_and_left_as_they_are() {
    let donors = donors();
    let (space, mut lane, _) = coded(&donors);
    for shard in 0..3 {
        alter(&donors, &space, shard, 30);
    }
    for round in 1..3 {
        let status = scrub_once(&space, &stored);
        let counted = (status.pages_repaired, status.pages_lost, status.rounds);
        assert_eq!(counted, (0, 3, round), "it is counted once");
    }
    assert_reads(&mut lane, &[3 * SEGMENT_PAGES + 30], TURN);
    space.release().unwrap();
}

#[test]
fn a_code_needs_copies() {
    let donors = donors();
    let config = SpaceConfig { redundancy: Redundancy::None, ..coded_config() };
    let refused = Space::create(config, cluster(&donors.iter().collect::<Vec<_>>()));
    assert!(matches!(refused, Err(SpaceError::CodeOfOneCopy(_))));
}
