//! Spaces with copies, on real donors over real sockets: donors die, are cut off, drain and come
//! back, and nobody who reads or writes notices.

use crate::common::silence::{end_silence, end_silence_after, silence, to_be_silenced};
use crate::common::*;
use hecaton_memory::{Epoch, PAGE_SIZE, PageSum, Size, page_sum};
use hecaton_space::group::DonorIndex;
use hecaton_space::{
    Completion, DonorStatus, Expected, FAILOVER, Redundancy, ScrubStatus, Space, SpaceConfig,
    SpaceError,
};
use hecaton_testkit::wait_until_seen;
use hecaton_transport::fault::{Chaos, Plan};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const SEGMENTS: u64 = 6;

const HOUR: Duration = Duration::from_secs(3600);

fn mirrored(copies: u8) -> SpaceConfig {
    SpaceConfig { redundancy: Redundancy::Mirror(copies), ..config(SEGMENTS * SEGMENT_PAGES) }
}

/// A request that waits for a silent donor, and for no other one, does not end before the silence.
fn mirrored_and_patient() -> SpaceConfig {
    let mut config = SpaceConfig { failover: FAILOVER, patience: HOUR, ..mirrored(2) };
    config.connection.answer = HOUR;
    config
}

fn some_pages() -> Vec<u64> {
    (0..SEGMENTS).map(|segment| segment * SEGMENT_PAGES + segment).collect()
}

/// Writes a page of each segment.
fn assert_all_written(lane: &mut hecaton_space::Lane, turn: u64) {
    some_pages().iter().for_each(|page| assert_written(lane, &[*page], turn));
}

/// Reads a page of each segment.
fn assert_all_read(lane: &mut hecaton_space::Lane, turn: u64) {
    some_pages().iter().for_each(|page| assert_reads(lane, &[*page], turn));
}

#[test]
fn each_page_is_with_two_donors_and_all_of_it_comes_back() {
    let donors = ["a", "b", "c"].map(|name| Lent::start(name, 8));
    let space = Space::create(mirrored(2), cluster(&donors.each_ref())).unwrap();
    let mut lane = space.lane().unwrap();
    for page in some_pages() {
        assert_written(&mut lane, &[page], 1);
        assert_reads(&mut lane, &[page], 1);
    }
    let extents: Vec<u64> = space.status().donors.iter().map(|donor| donor.extents).collect();
    assert_eq!(extents, [4, 4, 4]);
    assert!(is_whole(&space));
    space.discard(0, 1).unwrap();
    assert_zeros(&mut lane, &[0]);
    space.free_segment(1).unwrap();
    assert_zeros(&mut lane, &some_pages()[1..2]);
    space.release().unwrap();
    donors.iter().for_each(Lent::assert_all_comes_back);
}

#[test]
fn a_donor_that_dies_is_replaced_and_nothing_waits_for_it() {
    let mut donors = ["a", "b", "c"].map(|name| Lent::start(name, 16));
    let space = Space::create(mirrored(2), cluster(&donors.each_ref())).unwrap();
    let mut lane = space.lane().unwrap();
    assert_all_written(&mut lane, 1);
    donors[0].stop();
    for page in some_pages() {
        assert_reads(&mut lane, &[page], 1);
        write_until_stored(&mut lane, &[page], 2);
        assert_reads(&mut lane, &[page], 2);
    }
    assert!(!is_whole(&space));
    tend_until(&space, "whole again", is_whole);
    assert!(space.status().bytes_filled > 0);
    // The next one dies as well: the copies that were made meanwhile are as good.
    donors[1].stop();
    for page in some_pages() {
        assert_reads(&mut lane, &[page], 2);
        write_until_stored(&mut lane, &[page], 3);
        assert_reads(&mut lane, &[page], 3);
    }
    let _ = space.release();
    donors[2].assert_all_comes_back();
}

#[test]
fn a_silent_donor_holds_up_neither_reads_nor_writes() {
    let donors = ["a", "b"].map(|name| Lent::start(name, 16));
    let chaos = Chaos::before(donors[1].address(), to_be_silenced(), 1).unwrap();
    let known = cluster(&[&donors[0]]);
    known.set("b", chaos.address());
    let space = Space::create(mirrored_and_patient(), known).unwrap();
    let mut lane = space.lane().unwrap();
    write_until_whole(&space, &mut lane, &some_pages(), 1);
    silence(&chaos);
    end_silence_after(&chaos, || {
        for page in some_pages() {
            assert_reads(&mut lane, &[page], 1);
            write_until_stored(&mut lane, &[page], 2);
            assert_reads(&mut lane, &[page], 2);
        }
    });
    // The donor comes back, and no page that it missed is read from it.
    tend_until(&space, "whole again", is_whole);
    for page in some_pages() {
        for _ in 0..20 {
            assert_reads(&mut lane, &[page], 2);
        }
    }
    space.release().unwrap();
    donors.iter().for_each(Lent::assert_all_comes_back);
}

/// Two donors that say nothing: a read does not go to and fro between them for ever.
#[test]
fn a_read_fails_when_all_who_have_the_page_are_silent() {
    let donors = ["a", "b"].map(|name| Lent::start(name, 16));
    let chaos =
        donors.each_ref().map(|donor| Chaos::before(donor.address(), to_be_silenced(), 1).unwrap());
    let known = cluster(&[]);
    known.set("a", chaos[0].address());
    known.set("b", chaos[1].address());
    let mut config = mirrored_and_patient();
    config.patience = Duration::from_secs(2);
    config.connection.answer = Duration::from_millis(300);
    config.connection.connect = Duration::from_millis(300);
    let space = Space::create(config, known).unwrap();
    let mut lane = space.lane().unwrap();
    write_until_stored(&mut lane, &some_pages()[..1], 1);
    chaos.iter().for_each(silence);
    lane.read(5, &some_pages()[..1]).unwrap();
    let failure = wait_until_seen("the read fails", || {
        let mut failure = Err("the read waits for an answer");
        lane.progress(Some(Duration::from_millis(100)), &mut |completion| match completion {
            Completion::Failed { error, .. } => failure = Ok(error),
            other => panic!("{other:?}"),
        });
        failure
    });
    assert!(matches!(failure, SpaceError::Unreachable { .. }), "{failure:?}");
    chaos.iter().for_each(end_silence);
    space.release().unwrap();
}

/// Nobody has wanted anything of the other donor since its connection broke, so that it is not
/// known to be there again.
#[test]
fn reads_of_a_silent_donor_go_to_one_that_was_away_before() {
    let mut donors = ["a", "b"].map(|name| Lent::start(name, 16));
    let chaos = Chaos::before(donors[1].address(), to_be_silenced(), 1).unwrap();
    let known = cluster(&[&donors[0]]);
    known.set("b", chaos.address());
    let space = Space::create(mirrored_and_patient(), known).unwrap();
    let mut lane = space.lane().unwrap();
    write_until_whole(&space, &mut lane, &some_pages(), 1);
    let address = donors[0].stop();
    assert_all_read(&mut lane, 1);
    donors[0].serve_again(address);
    silence(&chaos);
    end_silence_after(&chaos, || assert_all_read(&mut lane, 1));
    space.release().unwrap();
    donors.iter().for_each(Lent::assert_all_comes_back);
}

/// The connection for copies is idle for long times, and may lead to a donor's life before.
#[test]
fn a_donor_that_comes_back_empty_is_filled_again() {
    let mut donors = ["a", "b"].map(|name| Lent::start(name, 16));
    let space = Space::create(mirrored(2), cluster(&donors.each_ref())).unwrap();
    let mut lane = space.lane().unwrap();
    assert_all_written(&mut lane, 1);
    for _ in 0..2 {
        let address = donors[0].stop();
        donors[0] = Lent::start_at("a", 16, address);
        space.renew();
        assert_eq!(space.status().segments_degraded, SEGMENTS);
        tend_until(&space, "whole again", is_whole);
        assert_all_read(&mut lane, 1);
    }
    space.release().unwrap();
    donors.iter().for_each(Lent::assert_all_comes_back);
}

/// Segments that have no extents yet are another matter: those are asked for on a connection that
/// others wait on, too.
#[test]
fn a_silent_donor_does_not_hold_up_segments_that_are_new() {
    let donors = ["a", "b"].map(|name| Lent::start(name, 16));
    let chaos = Chaos::before(donors[1].address(), to_be_silenced(), 1).unwrap();
    let known = cluster(&[&donors[0]]);
    known.set("b", chaos.address());
    let mut config = mirrored_and_patient();
    config.connection.connect = HOUR;
    let space = Space::create(config, known).unwrap();
    let mut lane = space.lane().unwrap();
    silence(&chaos);
    std::thread::scope(|scope| {
        // It has the connection, and waits for as long as the connection lets it.
        let renewing = scope.spawn(|| space.renew());
        end_silence_after(&chaos, || {
            for page in some_pages() {
                assert_written(&mut lane, &[page], 1);
                assert_reads(&mut lane, &[page], 1);
            }
        });
        renewing.join().unwrap();
    });
    space.renew();
    tend_until(&space, "whole", is_whole);
    space.release().unwrap();
    donors.iter().for_each(Lent::assert_all_comes_back);
}

#[test]
fn a_donor_drains_while_its_pages_are_written_and_read() {
    for copies in [1, 2] {
        let donors = ["a", "b", "c"].map(|name| Lent::start(name, 32));
        let redundancy = Redundancy::of_copies(copies).unwrap();
        let config = SpaceConfig { redundancy, ..mirrored(2) };
        let space = Space::create(config, cluster(&donors.each_ref())).unwrap();
        let mut lane = space.lane().unwrap();
        for page in some_pages() {
            assert_written(&mut lane, &[page, page + 1], 0);
        }
        donors[0].donor.set_draining(true);
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let tending = scope.spawn(|| {
                let is_empty = |space: &Space| {
                    let status = space.status();
                    status.donors.iter().all(|donor| donor.name != "a" || donor.extents == 0)
                        && is_whole(space)
                };
                tend_until(&space, "empty", is_empty);
                done.store(true, std::sync::atomic::Ordering::Release);
            });
            let mut turn = 1;
            while !done.load(std::sync::atomic::Ordering::Acquire) && !tending.is_finished() {
                for page in some_pages() {
                    write_until_stored(&mut lane, &[page], turn);
                    assert_reads(&mut lane, &[page], turn);
                    assert_reads(&mut lane, &[page + 1], 0);
                }
                turn += 1;
            }
            tending.join().unwrap();
            for page in some_pages() {
                assert_reads(&mut lane, &[page], turn - 1);
                assert_reads(&mut lane, &[page + 1], 0);
            }
        });
        space.renew();
        donors[0].assert_all_comes_back();
        space.release().unwrap();
        donors.iter().for_each(Lent::assert_all_comes_back);
    }
}

#[test]
fn segments_follow_the_donors_that_are_named() {
    let donors = ["a", "b", "c"].map(|name| Lent::start(name, 32));
    let space = Space::create(config(SEGMENTS * SEGMENT_PAGES), cluster(&donors.each_ref()));
    let space = space.unwrap();
    (SEGMENTS / 2..SEGMENTS).for_each(|segment| space.assign(segment, 1).unwrap());
    space.set_zones(vec![vec!["a".into()], vec!["b".into(), "c".into()]]);
    let mut lane = space.lane().unwrap();
    assert_all_written(&mut lane, 1);
    assert_eq!(space.donors_of_zone(0), BTreeMap::from([("a".into(), 3)]));
    assert_eq!(space.donors_of_zone(1).values().sum::<u64>(), 3);
    space.set_zones(vec![vec!["c".into()], vec!["a".into()]]);
    let moved = |space: &Space| {
        let only =
            |zone, name: &str| space.donors_of_zone(zone) == BTreeMap::from([(name.to_owned(), 3)]);
        only(0, "c") && only(1, "a")
    };
    tend_until(&space, "moved", moved);
    assert_all_read(&mut lane, 1);
    space.release().unwrap();
    donors.iter().for_each(Lent::assert_all_comes_back);
}

#[test]
fn without_its_last_copy_a_segment_is_lost_by_name_and_no_other() {
    let mut donors = ["a", "b", "c"].map(|name| Lent::start(name, 16));
    let space = Space::create(mirrored(2), cluster(&donors.each_ref())).unwrap();
    let mut lane = space.lane().unwrap();
    assert_all_written(&mut lane, 1);
    // Both come back without their memory.
    for at in [0, 1] {
        let address = donors[at].stop();
        let name = donors[at].name.clone();
        donors[at] = Lent::start_at(&name, 16, address);
    }
    space.renew();
    let mut lost = 0;
    for page in some_pages() {
        match read(&mut lane, &[page]) {
            Outcome::Read(data) => assert_eq!(data, content(page, 1)),
            Outcome::Failed(SpaceError::Lost { segment, donor, .. }) => {
                assert_eq!(segment, page / SEGMENT_PAGES);
                assert!(["a", "b"].contains(&donor.as_str()));
                lost += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(lost, 2, "of six segments with two copies at three donors");
    assert_eq!(space.status().segments_lost, 2);
}

/// Reads a page from other donors than those in `avoid`; returns who has sent it, and whether it is
/// right.
fn read_avoiding(
    lane: &mut hecaton_space::Lane,
    page: u64,
    avoid: &[DonorIndex],
) -> (DonorIndex, bool) {
    lane.read_avoiding(5, &[page], avoid).unwrap();
    let mut read = None;
    while read.is_none() {
        lane.progress(Some(Duration::from_secs(1)), &mut |completion| match completion {
            Completion::Read { giver, data, .. } => {
                read = giver.map(|giver| (giver, data == content(page, 1)));
            }
            other => panic!("{other:?}"),
        });
    }
    read.expect("the loop ends with one")
}

#[test]
fn a_page_that_came_back_wrong_is_read_elsewhere_and_mended() {
    let donors = ["a", "b"].map(|name| Lent::start(name, 16));
    let space = Space::create(mirrored(2), cluster(&donors.each_ref())).unwrap();
    let mut lane = space.lane().unwrap();
    let pages = some_pages();
    pages.iter().for_each(|page| assert_written(&mut lane, &[*page], 1));
    damage(&donors[0], &pages[2..3], 1);
    damage(&donors[1], &pages[3..4], 1);
    for (page, bad) in [(pages[2], 0), (pages[3], 1)] {
        let (bad, good) = (DonorIndex(bad), DonorIndex(1 - bad));
        for _ in 0..20 {
            assert_eq!(read_avoiding(&mut lane, page, &[bad]), (good, true));
            assert_eq!(read_avoiding(&mut lane, page, &[good]), (bad, false));
        }
        // Nobody else is left: perhaps it was damaged on its way.
        read_avoiding(&mut lane, page, &[bad, good]);
        space.suspect(page);
    }
    space.scrub_suspects(&stored(1));
    space.scrub_suspects(&stored(1));
    assert_eq!(space.status().scrub.pages_repaired, 2);
    for page in &pages[2..4] {
        for donor in [0, 1] {
            assert!(read_avoiding(&mut lane, *page, &[DonorIndex(donor)]).1);
        }
    }
    assert!(is_whole(&space), "no copy was given up for it");
    space.release().unwrap();
}

/// The generations that a lane's writes were acknowledged with.
fn write_noted(
    lane: &mut hecaton_space::Lane,
    page: u64,
    turn: u64,
    expected: &mut BTreeMap<u64, Expected>,
) {
    let data = content(page, turn);
    let sums = [hecaton_memory::page_sum(&data)];
    let mut noted = None;
    while noted.is_none() {
        lane.write(9, &[page], &sums, &[&data[..PAGE_SIZE]]).unwrap();
        let mut over = false;
        while !over {
            lane.progress(Some(Duration::from_secs(1)), &mut |completion| match completion {
                Completion::Written { generation, .. } => {
                    noted = Some(generation);
                    over = true;
                }
                Completion::Failed { error, .. } => {
                    assert!(error.is_transient(), "{error}");
                    over = true;
                }
                Completion::Read { .. } => unreachable!("nothing was read"),
            });
        }
    }
    let generation = noted.expect("the loop ends with one");
    expected.insert(page / SEGMENT_PAGES, Expected { pages: 1, generation });
}

#[test]
fn a_successor_passes_over_the_copy_that_missed_a_write() {
    let donors = ["a", "b"].map(|name| Lent::start(name, 16));
    let chaos = Chaos::before(donors[0].address(), Plan::default(), 1).unwrap();
    let known = Arc::new(Known::default());
    known.set("a", chaos.address());
    known.set("b", donors[1].address());
    let mut expected = BTreeMap::new();
    let first = Space::create(mirrored(2), known.clone()).unwrap();
    let mut lane = first.lane().unwrap();
    for page in some_pages() {
        write_noted(&mut lane, page, 1, &mut expected);
    }
    chaos.set_deaf(true);
    for page in some_pages() {
        write_noted(&mut lane, page, 2, &mut expected);
    }
    chaos.set_deaf(false);
    chaos.cut_all();
    let config = SpaceConfig { epoch: Epoch(2), ..mirrored(2) };
    let second = Space::adopt(config, known, &expected).unwrap();
    let mut lane = second.lane().unwrap();
    for page in some_pages() {
        for _ in 0..10 {
            assert_reads(&mut lane, &[page], 2);
        }
    }
    tend_until(&second, "whole again", is_whole);
    drop(first);
    second.release().unwrap();
    donors.iter().for_each(Lent::assert_all_comes_back);
}

/// Sums that a pager knows of pages that it has stored.
fn stored(turn: u64) -> impl Fn(u64) -> Option<PageSum> {
    move |page| some_pages().contains(&page).then(|| page_sum(&content(page, turn)))
}

#[test]
fn pages_that_go_bad_unread_are_mended() {
    let donors = ["a", "b"].map(|name| Lent::start(name, 16));
    let space = Space::create(mirrored(2), cluster(&donors.each_ref())).unwrap();
    let mut lane = space.lane().unwrap();
    let pages = some_pages();
    pages.iter().for_each(|page| assert_written(&mut lane, &[*page], 1));
    let status = scrub_once(&space, &stored(1));
    let bytes = 2 * SEGMENTS * SEGMENT_PAGES * PAGE_SIZE as u64;
    let clean = ScrubStatus { bytes_verified: bytes, rounds: 1, ..ScrubStatus::default() };
    assert_eq!(status, clean);
    damage(&donors[0], &pages[..3], 1);
    damage(&donors[1], &pages[3..4], 1);
    let status = scrub_once(&space, &stored(1));
    assert_eq!((status.pages_repaired, status.pages_lost, status.copies_given_up), (4, 0, 0));
    for page in &pages {
        (0..20).for_each(|_| assert_reads(&mut lane, &[*page], 1));
    }
    assert_eq!(scrub_once(&space, &stored(1)).pages_repaired, 4);
    assert!(is_whole(&space), "no copy was made anew for it");
    space.release().unwrap();
}

/// A drain takes the copy away in which pages are right that have gone bad in the other one: they
/// are mended before it goes, and nobody has to have looked for them.
#[test]
fn what_is_right_only_in_a_copy_that_leaves_is_mended_first() {
    // Whichever of the two the new copy is made from.
    for (leaves, stays) in [(0, 1), (1, 0)] {
        let donors = ["a", "b", "c"].map(|name| Lent::start(name, 16));
        donors[2].donor.set_limit(Some(Size(0)));
        let space = Space::create(mirrored(2), cluster(&donors.each_ref())).unwrap();
        let mut lane = space.lane().unwrap();
        let pages = some_pages();
        pages.iter().for_each(|page| assert_written(&mut lane, &[*page], 1));
        damage(&donors[stays], &pages[..3], 1);
        damage(&donors[leaves], &pages[3..4], 1);
        donors[2].donor.set_limit(None);
        donors[leaves].donor.set_draining(true);
        tend_until(&space, "empty", |space| {
            space.renew();
            let at_it = |donor: &DonorStatus| donor.name == donors[leaves].name;
            let status = space.status();
            status.donors.iter().all(|donor| !at_it(donor) || donor.extents == 0) && is_whole(space)
        });
        let status = scrub_once(&space, &stored(1));
        assert_eq!((status.pages_lost, status.copies_given_up), (0, 0));
        for page in &pages {
            (0..20).for_each(|_| assert_reads(&mut lane, &[*page], 1));
        }
        space.release().unwrap();
    }
}

#[test]
fn a_page_that_is_bad_in_every_copy_is_lost_until_it_is_written() {
    let donors = ["a", "b"].map(|name| Lent::start(name, 16));
    let space = Space::create(mirrored(2), cluster(&donors.each_ref())).unwrap();
    let mut lane = space.lane().unwrap();
    some_pages().iter().for_each(|page| write_until_stored(&mut lane, &[*page], 1));
    donors.iter().for_each(|lent| damage(lent, &some_pages()[4..5], 1));
    for round in 1..3 {
        let status = scrub_once(&space, &stored(1));
        let counted = (status.pages_repaired, status.pages_lost, status.rounds);
        assert_eq!(counted, (0, 1, round), "it is counted once");
    }
    write_until_stored(&mut lane, &some_pages()[4..5], 1);
    assert_eq!(scrub_once(&space, &stored(1)).pages_lost, 0);
    space.release().unwrap();
}

#[test]
fn a_copy_that_is_not_what_was_stored_is_made_anew() {
    let donors = ["a", "b"].map(|name| Lent::start(name, 16));
    let space = Space::create(mirrored(2), cluster(&donors.each_ref())).unwrap();
    let mut lane = space.lane().unwrap();
    some_pages().iter().for_each(|page| write_until_stored(&mut lane, &[*page], 1));
    // A donor that has forgotten a write that it has acknowledged.
    let page = some_pages()[2];
    let (segment, at) = (page / SEGMENT_PAGES, (page % SEGMENT_PAGES) as u32);
    assert!(write_past(&donors[1], &space, segment, at, &content(page, 9)));

    let status = scrub_once(&space, &stored(1));
    assert_eq!((status.copies_given_up, status.pages_repaired, status.pages_lost), (1, 0, 0));
    for _ in 0..20 {
        assert_reads(&mut lane, &[page], 1);
    }
    tend_until(&space, "whole again", is_whole);
    for _ in 0..20 {
        assert_reads(&mut lane, &[page], 1);
    }
    let again = scrub_once(&space, &stored(1));
    assert_eq!((again.copies_given_up, again.pages_lost), (1, 0));
    space.release().unwrap();
}
