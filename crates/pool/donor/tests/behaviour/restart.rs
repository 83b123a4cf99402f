//! A donor process that dies, and another that takes over its memory from a supervisor.

use crate::common::*;
use hecaton_donor::{Donor, DonorConfig, DonorError, DonorFds, LedgerError, ParkConfig, listen};
use hecaton_memory::{ExtentId, Generation, PAGE_SIZE, Size, page_sum};
use hecaton_transport::client::{Connection, Options, Outcome};
use hecaton_transport::protocol::{Refusal, Request};
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::sync::Barrier;

fn duplicate(fds: &DonorFds) -> DonorFds {
    let park = fds.park.as_ref().map(|park| park.try_clone().unwrap());
    DonorFds {
        arena: fds.arena.try_clone().unwrap(),
        ledger: fds.ledger.try_clone().unwrap(),
        park,
    }
}

#[test]
fn the_successor_has_the_pages_the_owners_and_the_fences() {
    let (donor, serving) = start(1000);
    let mut borrower = Borrower::connect(serving.address(), 1, 3);
    borrower.done(Request::Fence);
    let kept = borrower.allocate(5, 6);
    let freed = borrower.allocate(6, 6);
    borrower.write(kept, &[0, 63], &[page(1), page(2)]);
    borrower.write(freed, &[0], &[page(3)]);
    borrower.done(Request::Free { extent: freed });
    let boot = borrower.welcome().boot;
    let fds = donor.fds().unwrap();
    serving.stop();
    drop(donor);

    let donor = Donor::open(&config(1000), Some(fds)).unwrap();
    let serving = donor.serve(listen(config(1000).listen).unwrap()).unwrap();
    let mut borrower = Borrower::connect(serving.address(), 1, 3);
    assert_eq!(borrower.welcome().boot, boot, "its life goes on");
    assert_eq!(borrower.pages(kept, &[0, 1, 63]), [page(1), [0; PAGE_SIZE], page(2)]);
    assert_eq!(borrower.allocate(5, 6), kept);
    assert_eq!(
        borrower.refused(Request::Read { extent: freed, pages: &[0] }),
        Refusal::NoSuchExtent
    );
    let fresh = borrower.allocate(6, 6);
    assert!(fresh > freed, "an id is never used again");
    assert_eq!(borrower.pages(fresh, &[0]), [[0; PAGE_SIZE]]);
    let snapshot = donor.snapshot();
    assert_eq!(snapshot.committed_bytes, 2 * PAGE_SIZE as u64);
    assert_eq!(snapshot.spaces[0].consumer, "test-1");
    let stale = Connection::open(serving.address(), &hello(1, 2, LONG_LEASE), &Options::default());
    assert!(stale.is_err(), "the fence is forgotten");
}

#[test]
fn memory_that_is_not_this_donors_is_refused() {
    let donor = Donor::open(&config(1000), None).unwrap();
    let fds = donor.fds().unwrap();
    let open = |pages, fds| Donor::open(&config(pages), Some(fds)).map(drop).unwrap_err();

    let error = open(999, duplicate(&fds));
    assert!(matches!(error, DonorError::OtherSize { .. }), "{error}");
    let swapped = duplicate(&fds);
    let error = open(1000, DonorFds { arena: swapped.ledger, ledger: swapped.arena, park: None });
    assert!(matches!(error, DonorError::Ledger(LedgerError::Foreign)), "{error}");
    let file = || OwnedFd::from(File::open("/dev/null").unwrap());
    let error = open(1000, DonorFds { arena: file(), ledger: file(), park: None });
    assert!(error.to_string().contains("not sealed memory"), "{error}");

    let fds = |labels: &[&str]| labels.iter().map(|l| (l.to_string(), file())).collect::<Vec<_>>();
    assert!(DonorFds::from_labelled(fds(&["arena", "ledger", "listener"])).unwrap().is_some());
    assert!(DonorFds::from_labelled(fds(&["listener"])).unwrap().is_none());
    let error = DonorFds::from_labelled(fds(&["arena"])).unwrap_err();
    assert!(error.to_string().contains("`ledger`"), "{error}");
}

const CHILD: &str = "HECATON_TEST_DONOR";

/// Not a test by itself: the process that `killed_at_any_moment_loses_nothing_answered` kills.
#[test]
fn donor_process() {
    let Ok(paths) = std::env::var(CHILD) else { return };
    let open = |path| OwnedFd::from(File::options().read(true).write(true).open(path).unwrap());
    let [arena, ledger, park] = paths.split(' ').collect::<Vec<_>>()[..] else { panic!() };
    let fds = DonorFds { arena: open(arena), ledger: open(ledger), park: Some(open(park)) };
    let donor = Donor::open(&child_config(), Some(fds)).unwrap();
    // The limit is now above, now below the borrowers' extents, so that pages go to the file and
    // come back.
    let limits = [None, Some(Size(0)), Some(Size(6 * u64::from(PAGES) * PAGE_SIZE as u64))];
    let limited = donor.clone();
    std::thread::spawn(move || {
        for limit in limits.into_iter().cycle() {
            limited.set_limit(limit);
            std::thread::sleep(std::time::Duration::from_millis(7));
        }
    });
    let serving = donor.serve(listen(config(1).listen).unwrap()).unwrap();
    println!("\nserving at {}", serving.address());
    // The parent kills this process. Should the parent die, this ends.
    let _ = std::io::stdin().read(&mut [0]);
}

const CHILD_PAGES: u64 = 4096;

/// Parks as soon as it is to have something back.
fn child_config() -> DonorConfig {
    let patience = std::time::Duration::ZERO;
    let park = ParkConfig { patience, ..ParkConfig::new(hecaton_testkit::fast_dir()) };
    DonorConfig { park: Some(park), ..config(CHILD_PAGES) }
}

/// Borrowers allocate, write, discard and free without pause, while extents go to a file and come
/// back, and the donor is killed in the middle of it, again and again. Whatever was answered must
/// be so afterwards.
#[test]
fn killed_at_any_moment_loses_nothing_answered() {
    let supervisor = Donor::open(&child_config(), None).unwrap();
    let fds = supervisor.fds().unwrap();
    drop(supervisor);
    let path = |fd: &OwnedFd| format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
    let park = fds.park.as_ref().unwrap();
    let paths = format!("{} {} {}", path(&fds.arena), path(&fds.ledger), path(park));
    let mut known = [Known::default(), Known::default(), Known::default()];
    for round in 0..8u64 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "restart::donor_process", "--nocapture"])
            .env(CHILD, &paths)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let address = output.lines().map(Result::unwrap).find_map(|line| {
            line.strip_prefix("serving at ").map(|address| address.parse::<SocketAddr>().unwrap())
        });
        let address = address.expect("the donor process serves");
        let under_way = Barrier::new(known.len() + 1);
        std::thread::scope(|scope| {
            let under_way = &under_way;
            let borrowers: Vec<_> = known
                .iter_mut()
                .zip(1u64..)
                .map(|(known, space)| {
                    scope.spawn(move || known.verify_and_go_on(address, space, round, under_way))
                })
                .collect();
            under_way.wait();
            // Somewhere in the traffic; where, each round differs.
            std::thread::sleep(std::time::Duration::from_millis(5 + round * 7));
            child.kill().unwrap();
            let steps: u64 = borrowers.into_iter().map(|thread| thread.join().unwrap()).sum();
            assert!(steps > 0, "nothing was under way");
        });
        child.wait().unwrap();
    }
    let donor = Donor::open(&child_config(), Some(fds)).unwrap();
    let serving = donor.serve(listen(config(1).listen).unwrap()).unwrap();
    for (known, space) in known.iter().zip(1..) {
        known.verify(&mut Borrower::connect(serving.address(), space, 1));
    }
}

/// The answers that a borrower got.
#[derive(Default)]
struct Known {
    /// By segment.
    extents: HashMap<u64, ExtentId>,
    /// Contents by segment and page; none where a request without an answer has left either.
    pages: HashMap<(u64, u32), Option<u64>>,
    /// The segment of an allocation or a free without an answer.
    open: Option<u64>,
    step: u64,
}

const SEGMENTS: u64 = 4;
const PAGES: u32 = 64;

impl Known {
    fn verify(&self, borrower: &mut Borrower) {
        let Outcome::Held(lines) = borrower.call(Request::List { from: ExtentId(0) }) else {
            panic!("no list")
        };
        let held: HashMap<_, _> = lines.iter().map(|line| (line.segment, line.extent)).collect();
        for segment in (0..SEGMENTS).filter(|&segment| Some(segment) != self.open) {
            assert_eq!(held.get(&segment), self.extents.get(&segment), "segment {segment}");
        }
        for (&segment, &extent) in self.extents.iter().filter(|(s, _)| Some(**s) != self.open) {
            let all: Vec<u32> = (0..PAGES).collect();
            let read = borrower.read(extent, &all).unwrap();
            for (at, (found, whole)) in all.into_iter().zip(read) {
                match self.pages.get(&(segment, at)) {
                    Some(None) => {}
                    Some(Some(number)) => assert!(whole && found == page(*number)),
                    None => assert!(whole && found == [0; PAGE_SIZE]),
                }
            }
        }
    }

    /// Says how many requests were answered until the donor was gone.
    fn verify_and_go_on(
        &mut self,
        address: SocketAddr,
        space: u64,
        round: u64,
        under_way: &Barrier,
    ) -> u64 {
        let mut borrower = Borrower::connect(address, space, 1);
        self.verify(&mut borrower);
        // Settles the request without an answer, so that the segment's state is known again.
        if let Some(segment) = self.open.take() {
            let request =
                Request::Allocate { segment, member: 0, order: 6, generation: Generation(1) };
            let extent = std::iter::repeat_with(|| borrower.call(request)).find_map(|outcome| {
                let Outcome::Allocated(extent) = outcome else { return None };
                Some(extent)
            });
            let extent = extent.expect("it lends again after a while");
            borrower.done(Request::Discard {
                extent,
                generation: Generation(1),
                first: 0,
                count: PAGES,
            });
            self.extents.insert(segment, extent);
            self.pages.retain(|(of, _), _| *of != segment);
        }
        let mut seed = space * 1000 + round + 1;
        let mut answered = 0;
        loop {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            self.step += 1;
            let answer = self.ask(&mut borrower, seed);
            if answered == 0 {
                under_way.wait();
            }
            if answer.is_none() {
                return answered;
            }
            answered += 1;
        }
    }

    /// One request; none when it got no answer.
    fn ask(&mut self, borrower: &mut Borrower, seed: u64) -> Option<()> {
        let segment = seed % SEGMENTS;
        let Some(&extent) = self.extents.get(&segment) else {
            self.open = Some(segment);
            let request =
                Request::Allocate { segment, member: 0, order: 6, generation: Generation(1) };
            let extent = match borrower.0.call(request, &[]).ok()? {
                Outcome::Allocated(extent) => extent,
                // It is to have something back just now.
                Outcome::Refused(Refusal::Full) => {
                    self.open = None;
                    return Some(());
                }
                other => panic!("not allocated but {other:?}"),
            };
            self.extents.insert(segment, extent);
            self.open = None;
            return Some(());
        };
        let first = (seed >> 8) as u32 % (PAGES - 8);
        let run: Vec<u32> = (first..first + 8).collect();
        match (seed >> 32) % 10 {
            0 => {
                self.open = Some(segment);
                borrower.0.call(Request::Free { extent }, &[]).ok()?;
                self.extents.remove(&segment);
                self.pages.retain(|(of, _), _| *of != segment);
                self.open = None;
            }
            1 => {
                self.pages.extend(run.iter().map(|&at| ((segment, at), None)));
                let request =
                    Request::Discard { extent, generation: Generation(1), first, count: 8 };
                borrower.0.call(request, &[]).ok()?;
                self.pages.retain(|(of, at), _| *of != segment || !run.contains(at));
            }
            _ => {
                self.pages.extend(run.iter().map(|&at| ((segment, at), None)));
                let number = |at: u32| self.step * 100 + u64::from(at);
                let data: Vec<_> = run.iter().map(|&at| page(number(at))).collect();
                let sums: Vec<_> = data.iter().map(|page| page_sum(page)).collect();
                let request =
                    Request::Write { extent, generation: Generation(1), pages: &run, sums: &sums };
                borrower.0.call(request, &[data.as_flattened()]).ok()?;
                for at in run {
                    self.pages.insert((segment, at), Some(self.step * 100 + u64::from(at)));
                }
            }
        }
        Some(())
    }
}
