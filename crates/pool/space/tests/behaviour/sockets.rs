//! A space on real donors over real sockets, in one process.

use crate::common::*;
use hecaton_memory::{Epoch, Generation, PageNo, page_sum};
use hecaton_space::{Completion, Expected, Lane, Space, SpaceError};
use hecaton_testkit::wait_until_seen;
use hecaton_transport::fault::{Chaos, Plan};
use hecaton_transport::protocol::MAX_PAGES;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

/// How long a donor is silent, where it costs a test as much.
const SILENT: Duration = Duration::from_secs(5);

#[test]
fn pages_come_back_and_so_does_the_memory() {
    let donors = [Lent::start("a", 8), Lent::start("b", 8)];
    let space = Space::create(config(8 * SEGMENT_PAGES), cluster(&[&donors[0], &donors[1]]));
    let space = space.unwrap();
    let mut lane = space.lane().unwrap();
    assert_zeros(&mut lane, &[0, 3]);
    assert!(donors.iter().all(Lent::is_all_free), "reading takes nothing");
    for segment in 0..6 {
        let pages: Vec<_> = (0..SEGMENT_PAGES).map(|page| segment * SEGMENT_PAGES + page).collect();
        assert_written(&mut lane, &pages, 1);
        assert_reads(&mut lane, &pages, 1);
    }
    // Any order, the same page twice, one page alone.
    assert_reads(&mut lane, &[9, 5, 5, 63, 0], 1);
    assert_reads(&mut lane, &[9], 1);
    let status = space.status();
    assert_eq!((status.segments, status.segments_held, status.segments_lost), (8, 6, 0));
    assert!(status.donors.iter().all(|donor| donor.extents == 3 && donor.reachable));
    serde_json::to_string(&status).unwrap();

    space.discard(10, SEGMENT_PAGES).unwrap();
    assert_zeros(&mut lane, &[10, 63]);
    assert_zeros(&mut lane, &[64, 73]);
    assert_reads(&mut lane, &[9], 1);
    assert_reads(&mut lane, &[74], 1);
    space.free_segment(0).unwrap();
    assert_zeros(&mut lane, &[9]);
    assert_eq!(space.status().segments_held, 5);
    assert_written(&mut lane, &[9], 2);
    assert_zeros(&mut lane, &[8]);

    space.release().unwrap();
    space.release().unwrap();
    donors.iter().for_each(Lent::assert_all_comes_back);
    assert_zeros(&mut lane, &[9]);
}

#[test]
fn bad_requests_are_refused_and_leave_nothing_behind() {
    let donor = Lent::start("a", 8);
    let space = Space::create(config(SEGMENT_PAGES + 1), cluster(&[&donor])).unwrap();
    let mut lane = space.lane().unwrap();
    let many = vec![0; MAX_PAGES + 1];
    for pages in [&[][..], &[0, SEGMENT_PAGES], &[SEGMENT_PAGES + 1], &[u64::MAX], &many] {
        assert!(matches!(read(&mut lane, pages), Outcome::Failed(SpaceError::BadRequest { .. })));
        assert!(matches!(
            write(&mut lane, pages, 1),
            Outcome::Failed(SpaceError::BadRequest { .. })
        ));
    }
    assert!(matches!(space.free_segment(2), Err(SpaceError::BadRequest { .. })));
    assert!(matches!(space.free_segment(u64::MAX), Err(SpaceError::BadRequest { .. })));
    assert!(matches!(space.discard(0, SEGMENT_PAGES + 2), Err(SpaceError::BadRequest { .. })));
    assert_eq!(lane.in_flight(), 0);
    assert!(donor.is_all_free());
}

#[test]
fn without_a_donor_there_is_no_space() {
    let known = Arc::new(Known::default());
    assert!(matches!(Space::create(config(1), known.clone()), Err(SpaceError::NoDonor(0))));
    let unused = SocketAddr::from((Ipv4Addr::LOCALHOST, hecaton_testkit::unused_port()));
    known.set("gone", unused);
    assert!(matches!(Space::create(config(1), known), Err(SpaceError::NoDonor(1))));
    let donor = Lent::start("a", 8);
    let mut large = config(1);
    large.segment_order = 60;
    assert!(matches!(
        Space::create(large, cluster(&[&donor])),
        Err(SpaceError::SegmentOrder { order: 60, .. })
    ));
    let empty = Space::create(config(0), cluster(&[&donor]));
    assert!(matches!(empty, Err(SpaceError::Pages { pages: 0, .. })));
}

#[test]
fn a_full_pool_says_so_and_goes_on_when_a_donor_joins() {
    let small = Lent::start("small", 2);
    let known = cluster(&[&small]);
    let space = Space::create(config(8 * SEGMENT_PAGES), known.clone()).unwrap();
    let mut lane = space.lane().unwrap();
    assert_written(&mut lane, &[0], 1);
    assert_written(&mut lane, &[SEGMENT_PAGES], 1);
    let third = &[2 * SEGMENT_PAGES];
    let outcome = write(&mut lane, third, 1);
    assert!(matches!(outcome, Outcome::Failed(SpaceError::NoRoom { .. })), "{outcome:?}");
    assert_zeros(&mut lane, third);
    let joined = Lent::start("joined", 8);
    known.set("joined", joined.address());
    assert_written(&mut lane, third, 1);
    assert_reads(&mut lane, third, 1);
    assert_reads(&mut lane, &[0], 1);
    assert!(!joined.is_all_free());
}

#[test]
fn a_donor_that_comes_back_with_its_memory_is_not_noticed() {
    let mut donor = Lent::start("a", 8);
    let space = Space::create(config(SEGMENT_PAGES), cluster(&[&donor])).unwrap();
    let mut lane = space.lane().unwrap();
    assert_written(&mut lane, &[1, 2, 3], 1);
    let address = donor.stop();
    lane.read(1, &[1, 2, 3]).unwrap();
    donor.serve_again(address);
    assert!(matches!(finish(&mut lane, 1, 3), Outcome::Read(_)));
    // A write may have gone out on the connection that was broken, and is then to be repeated.
    let address = donor.stop();
    donor.serve_again(address);
    match write(&mut lane, &[1], 2) {
        Outcome::Written => {}
        Outcome::Failed(SpaceError::Interrupted { .. }) => assert_written(&mut lane, &[1], 2),
        other => panic!("{other:?}"),
    }
    assert_reads(&mut lane, &[1], 2);
    space.renew();
    assert!(space.status().donors[0].reachable);
}

#[test]
fn a_donor_that_comes_back_empty_is_a_clean_loss() {
    let mut donor = Lent::start("a", 8);
    let space = Space::create(config(2 * SEGMENT_PAGES), cluster(&[&donor])).unwrap();
    let mut lane = space.lane().unwrap();
    let mut other_lane = space.lane().unwrap();
    assert_written(&mut lane, &[1, 2, 3], 1);
    assert_reads(&mut other_lane, &[1], 1);
    let address = donor.stop();
    let donor = Lent::start_at("a", 8, address);
    for lane in [&mut lane, &mut other_lane] {
        for _ in 0..2 {
            let outcome = read(lane, &[1]);
            assert!(matches!(outcome, Outcome::Failed(SpaceError::Lost { segment: 0, .. })));
            let outcome = write(lane, &[1], 2);
            assert!(matches!(outcome, Outcome::Failed(SpaceError::Lost { segment: 0, .. })));
        }
    }
    assert_eq!(space.status().segments_lost, 1);
    // Another segment takes an extent of the new life, and the lost one does once it is given up.
    assert_written(&mut lane, &[SEGMENT_PAGES], 2);
    space.free_segment(0).unwrap();
    assert_zeros(&mut lane, &[1]);
    assert_written(&mut other_lane, &[1], 3);
    assert_reads(&mut lane, &[1], 3);
    space.release().unwrap();
    donor.assert_all_comes_back();
}

/// Asks a donor until it answers in time: on a busy machine it may be silent for longer than the
/// short patience of a test.
fn until_answered(mut ask: impl FnMut() -> Outcome) -> Outcome {
    wait_until_seen("the donor answers in time", || match ask() {
        Outcome::Failed(error) => Err(error),
        answer => Ok(answer),
    })
}

#[test]
fn a_silent_donor_is_an_error_within_the_patience() {
    let donor = Lent::start("a", 8);
    let chaos = Chaos::before(donor.address(), Plan::default(), 1).unwrap();
    let known = Arc::new(Known::default());
    known.set("a", chaos.address());
    let mut config = config(2 * SEGMENT_PAGES);
    let_be_silent_for(SILENT, &mut config);
    config.patience = Duration::from_secs(1);
    let space = Space::create(config, known).unwrap();
    let mut lane = space.lane().unwrap();
    until_answered(|| write(&mut lane, &[1], 1));
    chaos.set_deaf(true);
    chaos.cut_all();
    let outcome = read(&mut lane, &[1]);
    assert!(matches!(outcome, Outcome::Failed(SpaceError::Unreachable { .. })), "{outcome:?}");
    let outcome = write(&mut lane, &[1], 2);
    assert!(matches!(outcome, Outcome::Failed(SpaceError::Unreachable { .. })), "{outcome:?}");
    let outcome = write(&mut lane, &[SEGMENT_PAGES], 2);
    assert!(matches!(outcome, Outcome::Failed(SpaceError::NoRoom { .. })), "{outcome:?}");
    assert!(matches!(space.discard(1, 1), Err(SpaceError::Unreachable { .. })));
    assert!(matches!(space.release(), Err(SpaceError::Unreachable { .. })));
    chaos.set_deaf(false);
    chaos.cut_all();
    wait_until_seen("all is released", || space.release());
    donor.assert_all_comes_back();
}

/// Asks a silent donor until that is pointless. A pause between two requests, which a busy machine
/// makes too, begins the silence anew.
fn given_up(mut ask: impl FnMut() -> Outcome) -> SpaceError {
    loop {
        match ask() {
            Outcome::Failed(error) if error.is_transient() => {}
            Outcome::Failed(error) => return error,
            outcome => panic!("{outcome:?}"),
        }
    }
}

#[test]
fn a_donor_that_stays_away_is_given_up_by_name() {
    let donor = Lent::start("a", 8);
    let chaos = Chaos::before(donor.address(), Plan::default(), 1).unwrap();
    let known = Arc::new(Known::default());
    known.set("a", chaos.address());
    let mut config = config(2 * SEGMENT_PAGES);
    config.patience = Duration::from_millis(300);
    config.give_up = Duration::from_secs(1);
    let space = Space::create(config, known).unwrap();
    let mut lane = space.lane().unwrap();
    until_answered(|| write(&mut lane, &[1], 1));
    until_answered(|| write(&mut lane, &[SEGMENT_PAGES], 1));
    chaos.set_deaf(true);
    chaos.cut_all();
    let error = given_up(|| read(&mut lane, &[SEGMENT_PAGES])).to_string();
    let space_id = space.config().id.to_string();
    for part in ["segment 1 ", &space_id, "donor a "] {
        assert!(error.contains(part), "no {part} in: {error}");
    }
    let error = given_up(|| write(&mut lane, &[1], 2));
    assert!(matches!(error, SpaceError::Away { .. }), "{error:?}");
    // One answer, and there is patience again.
    chaos.set_deaf(false);
    chaos.cut_all();
    let answer = until_answered(|| read(&mut lane, &[1]));
    assert!(matches!(answer, Outcome::Read(data) if data == content(1, 1)));
    chaos.set_deaf(true);
    chaos.cut_all();
    let outcome = read(&mut lane, &[1]);
    assert!(matches!(outcome, Outcome::Failed(SpaceError::Unreachable { .. })), "{outcome:?}");
}

/// Knowledge of a predecessor that stored one page in each of these segments.
fn one_page_of(segments: impl IntoIterator<Item = u64>) -> BTreeMap<u64, Expected> {
    let expected = Expected { pages: 1, generation: Generation::default() };
    segments.into_iter().map(|segment| (segment, expected)).collect()
}

#[test]
fn a_successor_finds_everything_and_its_predecessor_is_fenced() {
    let donors = [Lent::start("a", 8), Lent::start("b", 8)];
    let known = cluster(&[&donors[0], &donors[1]]);
    let first = Space::create(config(8 * SEGMENT_PAGES), known.clone()).unwrap();
    let mut lane = first.lane().unwrap();
    let pages: Vec<_> = (0..6).map(|segment| segment * SEGMENT_PAGES + 5).collect();
    for page in &pages {
        assert_written(&mut lane, &[*page], 1);
    }
    let mut config = config(8 * SEGMENT_PAGES);
    config.epoch = Epoch(2);
    // The last of them is nowhere.
    let expected = one_page_of([0, 1, 2, 3, 4, 5, 7]);
    let second = Space::adopt(config.clone(), known.clone(), &expected).unwrap();
    assert_eq!(second.status().segments_held, 6);
    let mut successor = second.lane().unwrap();
    for page in &pages {
        assert_reads(&mut successor, &[*page], 1);
    }
    // On connections that were open before, and on those that are opened now.
    let outcome = write(&mut lane, &pages[..1], 9);
    assert!(matches!(outcome, Outcome::Failed(SpaceError::Fenced { .. })), "{outcome:?}");
    let outcome = read(&mut lane, &pages[..1]);
    assert!(matches!(outcome, Outcome::Failed(SpaceError::Fenced { .. })), "{outcome:?}");
    assert!(matches!(first.release(), Err(SpaceError::Fenced { .. })));
    assert!(first.is_fenced());
    config.epoch = Epoch(1);
    assert!(matches!(Space::adopt(config, known, &expected), Err(SpaceError::Fenced { .. })));
    assert_reads(&mut successor, &pages[..1], 1);
    // An expected segment that no donor has is lost. One that was never written is zeros.
    let outcome = read(&mut successor, &[7 * SEGMENT_PAGES]);
    assert!(matches!(outcome, Outcome::Failed(SpaceError::Lost { segment: 7, .. })));
    assert_zeros(&mut successor, &[6 * SEGMENT_PAGES]);
    second.release().unwrap();
    donors.iter().for_each(Lent::assert_all_comes_back);
}

#[test]
fn a_successor_does_not_take_an_unreachable_donors_pages_for_zeros() {
    let donors = [Lent::start("a", 8), Lent::start("b", 8)];
    let chaos = Chaos::before(donors[1].address(), Plan::default(), 1).unwrap();
    let known = cluster(&[&donors[0]]);
    known.set("b", chaos.address());
    let first = Space::create(config(4 * SEGMENT_PAGES), known.clone()).unwrap();
    let mut lane = first.lane().unwrap();
    let pages: Vec<_> = (0..4).map(|segment| segment * SEGMENT_PAGES).collect();
    for page in &pages {
        assert_written(&mut lane, &[*page], 1);
    }
    chaos.set_deaf(true);
    chaos.cut_all();
    let mut config = config(4 * SEGMENT_PAGES);
    config.epoch = Epoch(2);
    let_be_silent_for(SILENT, &mut config);
    let second = Space::adopt(config, known, &one_page_of(0..4)).unwrap();
    let mut lane = second.lane().unwrap();
    let lost = pages.iter().filter(|page| {
        wait_until_seen("the page is read, or lost", || match read(&mut lane, &[**page]) {
            Outcome::Read(data) => {
                assert_eq!(data, content(**page, 1));
                Ok(false)
            }
            Outcome::Failed(SpaceError::Lost { donor, .. }) => Ok(donor == "b"),
            Outcome::Failed(error) if error.is_transient() => Err(error),
            other => panic!("{other:?}"),
        })
    });
    assert_eq!(lost.count(), 2);
    chaos.set_deaf(false);
    chaos.cut_all();
    for page in &pages {
        let answer = until_answered(|| {
            second.renew();
            read(&mut lane, &[*page])
        });
        assert!(matches!(answer, Outcome::Read(data) if data == content(*page, 1)));
    }
}

#[test]
fn threads_share_the_space_and_nothing_else() {
    let donors = [Lent::start("a", 20), Lent::start("b", 20)];
    let space = Space::create(config(16 * SEGMENT_PAGES), cluster(&[&donors[0], &donors[1]]));
    let space = &space.unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                let mut lane = space.lane().unwrap();
                for turn in 0..20 {
                    // All threads write to all segments, each to pages of its own.
                    for segment in 0..16 {
                        let page = segment * SEGMENT_PAGES + thread;
                        assert_written(&mut lane, &[page, page + 32], turn);
                        assert_reads(&mut lane, &[page + 32, page], turn);
                    }
                }
            });
        }
    });
    let held: BTreeSet<u64> = space.status().donors.iter().map(|donor| donor.extents).collect();
    assert_eq!(held, BTreeSet::from([8]), "each segment is held once");
}

#[test]
fn more_than_the_window_may_be_asked_for_at_once() {
    let donor = Lent::start("a", 8);
    let space = Space::create(config(4 * SEGMENT_PAGES), cluster(&[&donor])).unwrap();
    let mut lane = space.lane().unwrap();
    let all: Vec<PageNo> = (0..SEGMENT_PAGES).collect();
    assert_written(&mut lane, &all, 1);
    let mut accepted = 0;
    let refused = loop {
        match lane.read(accepted, &all[..32]) {
            Ok(()) => accepted += 1,
            Err(error) => break error,
        }
    };
    assert!(matches!(refused, SpaceError::Busy(_)) && refused.is_transient());
    assert_eq!(lane.in_flight(), accepted as usize);
    // A write makes room for itself; what comes meanwhile is kept.
    let mut pages_read = 0;
    let mut written = 0;
    for turn in 0..8 {
        let contents = content(SEGMENT_PAGES, turn);
        let sums = [page_sum(&contents)];
        while let Err(error) = lane.write(1 << 32 | turn, &[SEGMENT_PAGES], &sums, &[&contents]) {
            assert!(matches!(error, SpaceError::Busy(_)), "{error}");
            lane.progress(Some(Duration::from_secs(10)), &mut |completion| match completion {
                Completion::Read { sums, .. } => pages_read += sums.len(),
                Completion::Written { .. } => written += 1,
                Completion::Failed { error, .. } => panic!("{error}"),
            });
        }
    }
    while lane.in_flight() > 0 {
        lane.progress(Some(Duration::from_secs(10)), &mut |completion| match completion {
            Completion::Read { sums, .. } => pages_read += sums.len(),
            Completion::Written { .. } => written += 1,
            Completion::Failed { error, .. } => panic!("{error}"),
        });
    }
    assert_eq!((pages_read as u64, written), (accepted * 32, 8));
    assert_reads(&mut lane, &[SEGMENT_PAGES], 7);
}

/// Lanes through a network that cuts, drops, corrupts and delays: whatever is acknowledged is
/// there, and whatever is read was written.
#[test]
fn a_bad_network_costs_time_and_nothing_else() {
    let mut interrupted = 0;
    for seed in 0..4 {
        let donors = [Lent::start("a", 8), Lent::start("b", 8)];
        let known = Arc::new(Known::default());
        let good = Plan::default();
        let chaos: Vec<Chaos> =
            donors.iter().map(|d| Chaos::before(d.address(), good, seed).unwrap()).collect();
        for (donor, chaos) in donors.iter().zip(&chaos) {
            known.set(&donor.name, chaos.address());
        }
        let mut config = config(4 * SEGMENT_PAGES);
        config.connection.answer = Duration::from_millis(150);
        config.connection.connect = Duration::from_millis(150);
        let space = Space::create(config, known).unwrap();
        let mut lane = space.lane().unwrap();
        let bad = Plan {
            grain_bytes: 2048,
            delayed: 20_000,
            delay: Duration::from_micros(500),
            dropped: 2_000,
            corrupted: 2_000,
            cut: 3_000,
            ..Plan::default()
        };
        chaos.iter().for_each(|chaos| chaos.set_plan(bad));
        let mut possible: BTreeMap<PageNo, Vec<u64>> = BTreeMap::new();
        for turn in 1..150 {
            let page = turn * 37 % (4 * SEGMENT_PAGES);
            let turns = possible.entry(page).or_default();
            turns.push(turn);
            wait_until_seen("the page is written", || {
                match write(&mut lane, &[page], turn) {
                    Outcome::Written => return Ok(()),
                    Outcome::Failed(error) if error.is_transient() => interrupted += 1,
                    // Donors that did not answer are asked for no extents until they are heard.
                    Outcome::Failed(SpaceError::NoRoom { .. }) => space.renew(),
                    other => panic!("seed {seed}, turn {turn}: {other:?}"),
                }
                Err("all attempts have failed")
            });
            *turns = vec![turn];
            let (&page, turns) = possible.range(page / 2..).next().expect("at least one page");
            match read_unverified(&mut lane, page) {
                Some(data) => assert!(
                    turns.iter().any(|turn| data == content(page, *turn)),
                    "seed {seed}, turn {turn}: page {page} is none of {turns:?}"
                ),
                None => interrupted += 1,
            }
        }
        chaos.iter().for_each(|chaos| chaos.set_plan(good));
        for (page, turns) in possible {
            assert_reads(&mut lane, &[page], turns[0]);
        }
        space.renew();
        wait_until_seen("all is released", || space.release());
        donors.iter().for_each(Lent::assert_all_comes_back);
    }
    assert!(interrupted > 0, "the network was too good");
}

/// The page, or nothing if it came corrupted: the sums are for the reader to verify.
fn read_unverified(lane: &mut Lane, page: PageNo) -> Option<Vec<u8>> {
    lane.read(3, &[page]).unwrap();
    let mut outcome = None;
    while outcome.is_none() {
        lane.progress(Some(Duration::from_secs(10)), &mut |completion| {
            outcome = Some(match completion {
                Completion::Read { sums, data, .. } if page_sum(data) == sums[0] => {
                    Some(data.to_vec())
                }
                Completion::Read { .. } => None,
                Completion::Failed { error, .. } if error.is_transient() => None,
                other => panic!("{other:?}"),
            });
        });
    }
    outcome.flatten()
}
