//! Both ends over real sockets: what a request costs is shown elsewhere, here is what becomes of it
//! when the peer or the network misbehaves.

use hecaton_memory::{Epoch, ExtentId, Generation, PAGE_SIZE, SpaceId, page_sum};
use hecaton_pki::Role;
use hecaton_pki::testing::TestAuthority;
use hecaton_testkit::{patience, wait_until};
use hecaton_transport::client::{Connection, ConnectionError, Event, Options, Outcome};
use hecaton_transport::fault::{Chaos, Plan};
use hecaton_transport::protocol::{
    HeldExtent, Hello, Load, MAX_PAGES, OWNERS_SINCE, Refusal, Request, VERSIONS, Welcome,
};
use hecaton_transport::server::{Caller, Limits, Replied, Reply, Server, Service};
use hecaton_transport::tls::{CredentialsDir, Destination, Tls};
use hecaton_transport::window::WindowLimits;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

const EXTENT: ExtentId = ExtentId(7);
const PAGES: usize = 1024;

/// A space that is another node's.
const OTHERS: SpaceId = SpaceId(2);

/// One extent of plain memory.
struct Shelf {
    pages: Mutex<Vec<[u8; PAGE_SIZE]>>,
    open: AtomicUsize,
    /// The last caller's node, and the version that is spoken with it.
    caller: Mutex<(Option<String>, u16)>,
    /// Fences that the service has begun. Each is in service until nobody else holds the gate.
    fences: AtomicUsize,
    gate: Mutex<()>,
}

struct Visit(Arc<Shelf>);

impl Drop for Visit {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Shop(Arc<Shelf>);

const LOAD: Load = Load { free_pages: 5, in_service: 1, draining: false, recalled: 3 };

impl Service for Shop {
    type Session = Visit;

    fn hello(&self, hello: &Hello, caller: Caller<'_>) -> Result<(Welcome, Visit), Refusal> {
        *self.0.caller.lock().unwrap() = (caller.node.map(str::to_owned), caller.version);
        if hello.epoch < Epoch(1) {
            return Err(Refusal::StaleEpoch(Epoch(1)));
        }
        if hello.space == OTHERS {
            return Err(Refusal::OtherNode);
        }
        self.0.open.fetch_add(1, Ordering::SeqCst);
        let welcome = Welcome { version: 0, boot: 9, donor: "shop".into(), load: LOAD };
        Ok((welcome, Visit(self.0.clone())))
    }

    fn handle(
        &self,
        _visit: &mut Visit,
        request: Request<'_>,
        data: &[u8],
        reply: Reply<'_>,
    ) -> Replied {
        let mut shelf = self.0.pages.lock().unwrap();
        let missing = |pages: &[u32]| pages.iter().any(|page| *page as usize >= PAGES);
        match request {
            Request::Read { pages, .. } | Request::Write { pages, .. } if missing(pages) => {
                reply.refused(Refusal::OutOfBounds, LOAD)
            }
            Request::Read { pages, .. } => {
                let pages: Vec<_> = pages.iter().map(|page| &shelf[*page as usize]).collect();
                let sums: Vec<_> = pages.iter().map(|page| page_sum(*page)).collect();
                let data: Vec<_> = pages
                    .iter()
                    .map(|page| libc::iovec {
                        iov_base: page.as_ptr().cast_mut().cast(),
                        iov_len: PAGE_SIZE,
                    })
                    .collect();
                // SAFETY: the pages are borrowed from the locked shelf for the whole call.
                unsafe { reply.pages(&sums, &data, LOAD) }
            }
            Request::Write { pages, sums, .. } => {
                let (data, _) = data.as_chunks::<PAGE_SIZE>();
                for (place, (page, sum)) in data.iter().zip(sums).enumerate() {
                    if page_sum(page) != *sum {
                        return reply.refused(Refusal::Corrupt(place as u32), LOAD);
                    }
                }
                for (number, page) in pages.iter().zip(data) {
                    shelf[*number as usize] = *page;
                }
                reply.done(LOAD)
            }
            Request::Allocate { .. } => reply.allocated(EXTENT, LOAD),
            Request::List { .. } => {
                let line = HeldExtent {
                    extent: EXTENT,
                    segment: 0,
                    member: 0,
                    order: 10,
                    written: 3,
                    generation: Generation(1),
                };
                reply.held(&[line; 3], LOAD)
            }
            Request::Fence => {
                drop(shelf);
                self.0.fences.fetch_add(1, Ordering::SeqCst);
                drop(self.0.gate.lock().unwrap());
                reply.done(LOAD)
            }
            Request::FreeAll => reply.refused(Refusal::OtherNode, LOAD),
            _ => reply.done(LOAD),
        }
    }
}

struct Fixture {
    shelf: Arc<Shelf>,
    server: Server,
}

/// Whether connections are protected, and with what.
struct Network {
    /// The authority, the donor's certificate and the borrower's.
    pki: Option<(TestAuthority, Arc<CredentialsDir>, Arc<CredentialsDir>)>,
}

impl Network {
    fn plain() -> Network {
        Network { pki: None }
    }

    fn secure() -> Network {
        let pki = TestAuthority::in_scratch();
        let [donor, borrower] = ["shop", "customer"].map(|name| pki.credentials(name, Role::Node));
        Network { pki: Some((pki, donor, borrower)) }
    }

    fn serve(&self, limits: Limits) -> Fixture {
        let shelf = Arc::new(Shelf {
            pages: Mutex::new(vec![[0; PAGE_SIZE]; PAGES]),
            open: AtomicUsize::new(0),
            caller: Mutex::default(),
            fences: AtomicUsize::new(0),
            gate: Mutex::default(),
        });
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let credentials = self.pki.as_ref().map(|(_, donor, _)| Arc::clone(donor));
        let shop = Arc::new(Shop(shelf.clone()));
        let server = Server::start(listener, shop, limits, credentials).unwrap();
        Fixture { shelf, server }
    }

    fn to(&self, address: SocketAddr) -> Destination {
        let tls = self.pki.as_ref().map(|(_, _, borrower)| Tls {
            credentials: Arc::clone(borrower),
            node: Some("shop".to_owned()),
        });
        Destination { address, tls }
    }
}

/// Runs a test without TLS and with it.
fn each_way(test: impl Fn(&Network)) {
    test(&Network::plain());
    test(&Network::secure());
}

fn serve(limits: Limits) -> Fixture {
    Network::plain().serve(limits)
}

fn hello(lane: u64) -> Hello {
    Hello {
        versions: VERSIONS,
        space: SpaceId(1),
        epoch: Epoch(1),
        lane,
        lease: Duration::from_secs(30),
        consumer: "test".into(),
    }
}

fn connect(to: impl Into<Destination>, lane: u64) -> Connection {
    Connection::open(to, &hello(lane), &Options::default()).unwrap()
}

fn page(seed: u8) -> [u8; PAGE_SIZE] {
    std::array::from_fn(|at| (at as u8).wrapping_mul(31).wrapping_add(seed))
}

fn write<'a>(pages: &'a [u32], sums: &'a [u32]) -> Request<'a> {
    Request::Write { extent: EXTENT, generation: Generation(1), pages, sums }
}

fn write_page(connection: &mut Connection, number: u32, page: &[u8]) -> Outcome {
    connection.call(write(&[number], &[page_sum(page)]), &[page]).unwrap()
}

fn read_page(connection: &mut Connection, number: u32) -> Vec<u8> {
    let request = Request::Read { extent: EXTENT, pages: &[number] };
    match connection.call(request, &[]).unwrap() {
        Outcome::Pages { sums, data } => {
            assert_eq!(sums, [page_sum(&data)]);
            data
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn every_request_gets_its_answer() {
    each_way(|network| {
        let fixture = network.serve(Limits::default());
        let mut connection = connect(network.to(fixture.server.address()), 1);
        assert_eq!(connection.welcome().unwrap().boot, 9);
        assert_eq!(connection.welcome().unwrap().version, VERSIONS.1);
        let node = network.pki.as_ref().map(|_| "customer".to_owned());
        let caller = fixture.shelf.caller.lock().unwrap().clone();
        assert_eq!(caller, (node, VERSIONS.1), "who it is, is told");
        assert_eq!(read_page(&mut connection, 3), [0; PAGE_SIZE]);
        assert_eq!(write_page(&mut connection, 3, &page(3)), Outcome::Done);
        assert_eq!(read_page(&mut connection, 3), page(3));
        let allocate =
            Request::Allocate { segment: 0, member: 0, order: 10, generation: Generation(1) };
        assert_eq!(connection.call(allocate, &[]).unwrap(), Outcome::Allocated(EXTENT));
        let Outcome::Held(lines) =
            connection.call(Request::List { from: ExtentId(0) }, &[]).unwrap()
        else {
            panic!("no list");
        };
        assert_eq!(lines.len(), 3);
        let outside = Request::Read { extent: EXTENT, pages: &[PAGES as u32] };
        assert_eq!(connection.call(outside, &[]).unwrap(), Outcome::Refused(Refusal::OutOfBounds));
        assert_eq!(connection.load(), LOAD);
    });
}

#[test]
fn a_wrong_sum_stores_nothing() {
    each_way(|network| {
        let fixture = network.serve(Limits::default());
        let mut connection = connect(network.to(fixture.server.address()), 1);
        let (good, bad) = (page(1), page(2));
        let request = Request::Write {
            extent: EXTENT,
            generation: Generation(1),
            pages: &[0, 1],
            sums: &[page_sum(&good), page_sum(&good)],
        };
        let outcome = connection.call(request, &[&good, &bad]).unwrap();
        assert_eq!(outcome, Outcome::Refused(Refusal::Corrupt(1)));
        assert_eq!(read_page(&mut connection, 0), [0; PAGE_SIZE]);
    });
}

/// Reads and writes of many sizes, with more under way in both directions than the sockets hold:
/// a submission has to take in answers for the donor to go on.
#[test]
fn a_full_pipe_in_both_directions_does_not_lock() {
    each_way(|network| {
        let fixture = network.serve(Limits::default());
        let window = WindowLimits { requests: 512, payload_bytes: 128 << 20 };
        let options = Options { window, ..Options::default() };
        let mut connection =
            Connection::open(network.to(fixture.server.address()), &hello(1), &options).unwrap();
        let contents: Vec<_> = (0..MAX_PAGES).map(|n| page(n as u8)).collect();
        let pages: Vec<u32> = (0..MAX_PAGES as u32).collect();
        let sums: Vec<u32> = contents.iter().map(|page| page_sum(page)).collect();
        let pieces: Vec<&[u8]> = contents.iter().map(|page| page.as_slice()).collect();
        let mut waited = false;
        for tag in 0..40u64 {
            let write = Request::Write {
                extent: EXTENT,
                generation: Generation(1),
                pages: &pages,
                sums: &sums,
            };
            connection.submit(tag << 32, write, &pieces).unwrap();
            let count = 1 + tag as usize % MAX_PAGES;
            let read = Request::Read { extent: EXTENT, pages: &pages[..MAX_PAGES - count] };
            connection.submit(tag, read, &[]).unwrap();
            waited |= connection.has_undelivered();
        }
        let (mut done, mut read) = (0, [0usize; 40]);
        while connection.in_flight() > 0 {
            connection
                .progress(&mut |tag, event| match event {
                    Event::Done => done += 1,
                    Event::Pages { from, sums, data } => {
                        assert_eq!(from, read[tag as usize], "pages out of order");
                        read[tag as usize] += sums.len();
                        for (at, page) in data.chunks(PAGE_SIZE).enumerate() {
                            assert_eq!(page, contents[from + at]);
                        }
                    }
                    other => panic!("{other:?}"),
                })
                .unwrap();
        }
        assert_eq!(done, 40);
        assert!(read.iter().enumerate().all(|(tag, pages)| *pages == MAX_PAGES - 1 - tag));
        assert!(waited, "the pipe was never full: the test tests nothing");
    });
}

/// More is held than the socket takes while the donor is busy. No call waits; all goes in order.
#[test]
fn what_is_held_is_sent_as_it_is_taken() {
    let fixture = serve(Limits::default());
    let window = WindowLimits { requests: 512, payload_bytes: 128 << 20 };
    let options = Options { window, ..Options::default() };
    let mut connection = Connection::open(fixture.server.address(), &hello(1), &options).unwrap();
    let contents: Vec<_> = (0..MAX_PAGES).map(|n| page(n as u8)).collect();
    let pages: Vec<u32> = (0..MAX_PAGES as u32).collect();
    let sums: Vec<u32> = contents.iter().map(|page| page_sum(page)).collect();
    let pieces: Vec<&[u8]> = contents.iter().map(|page| page.as_slice()).collect();
    let (extent, generation) = (EXTENT, Generation(1));
    let write = Request::Write { extent, generation, pages: &pages, sums: &sums };
    let read = Request::Read { extent, pages: &[9] };
    {
        let _busy = fixture.shelf.pages.lock().unwrap();
        for tag in 0..40 {
            connection.hold(tag, write, &pieces).unwrap();
        }
        connection.hold(40, read, &[]).unwrap();
        assert!(connection.has_held());
        connection.release().unwrap();
        assert!(connection.has_held(), "the socket takes all: the test tests nothing");
    }
    let mut answered = Vec::new();
    while connection.in_flight() > 0 {
        connection.release().unwrap();
        connection
            .progress(&mut |tag, event| match event {
                Event::Done => answered.push(tag),
                Event::Pages { data, .. } => {
                    assert!(*data == contents[9]);
                    answered.push(tag);
                }
                other => panic!("{other:?}"),
            })
            .unwrap();
    }
    assert!(answered.into_iter().eq(0..=40));
}

#[test]
fn held_and_submitted_requests_keep_their_order() {
    each_way(|network| {
        let fixture = network.serve(Limits::default());
        let mut connection = connect(network.to(fixture.server.address()), 1);
        let old = [0; PAGE_SIZE];
        let new = page(1);
        let (extent, generation) = (EXTENT, Generation(1));
        let write = Request::Write { extent, generation, pages: &[3], sums: &[page_sum(&new)] };
        let read = Request::Read { extent, pages: &[3] };
        connection.hold(0, read, &[]).unwrap();
        connection.submit(1, write, &[&new]).unwrap();
        assert!(!connection.has_held());
        connection.hold(2, read, &[]).unwrap();
        connection.release().unwrap();
        let mut heard = Vec::new();
        while connection.in_flight() > 0 {
            connection
                .progress(&mut |tag, event| match event {
                    Event::Pages { data, .. } => heard.push((tag, data.to_vec())),
                    _ => heard.push((tag, Vec::new())),
                })
                .unwrap();
        }
        assert!(heard == [(0, old.to_vec()), (1, Vec::new()), (2, new.to_vec())]);
    });
}

/// Reads on one connection, writes on another, from two threads: no lock is shared, and every page
/// that is read is one state of it.
#[test]
fn threads_have_connections_of_their_own() {
    each_way(|network| {
        let fixture = network.serve(Limits::default());
        let address = fixture.server.address();
        std::thread::scope(|scope| {
            for lane in 0..4u64 {
                scope.spawn(move || {
                    let mut connection = connect(network.to(address), lane);
                    for turn in 0..200u8 {
                        let number = lane as u32 * 100 + u32::from(turn) % 10;
                        write_page(&mut connection, number, &page(turn));
                        assert_eq!(read_page(&mut connection, number), page(turn));
                    }
                });
            }
        });
    });
}

#[test]
fn a_malformed_frame_ends_its_connection_and_no_other() {
    let fixture = serve(Limits::default());
    let address = fixture.server.address();
    let mut healthy = connect(address, 1);
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 200], &[0; 200]] {
        let mut raw = TcpStream::connect(address).unwrap();
        raw.write_all(garbage).unwrap();
        // Either an orderly end or a reset: the connection is gone.
        let _ = raw.read_to_end(&mut Vec::new());
        let mut greeted = TcpStream::connect(address).unwrap();
        greeted.write_all(&hecaton_transport::codec::encode_hello(&hello(2))).unwrap();
        let mut welcome = [0; hecaton_transport::codec::WELCOME_BYTES];
        greeted.read_exact(&mut welcome).unwrap();
        greeted.write_all(garbage).unwrap();
        greeted.write_all(&[0xee; 100]).unwrap();
        let _ = greeted.read_to_end(&mut Vec::new());
        assert_eq!(read_page(&mut healthy, 0), [0; PAGE_SIZE]);
    }
    wait_until("only one visit left", || fixture.shelf.open.load(Ordering::SeqCst) == 1);
}

#[test]
fn the_next_connection_of_a_lane_ends_the_one_before() {
    each_way(|network| {
        let fixture = network.serve(Limits { handshake: patience(), ..Limits::default() });
        let address = fixture.server.address();
        let mut first = connect(network.to(address), 1);
        let mut other_lane = connect(network.to(address), 2);
        // Still in service when the second connection comes; the write behind it is not begun.
        let gate = fixture.shelf.gate.lock().unwrap();
        first.submit(0, Request::Fence, &[]).unwrap();
        wait_until("the fence is in service", || fixture.shelf.fences.load(Ordering::SeqCst) == 1);
        let late = page(1);
        first.submit(1, write(&[0], &[page_sum(&late)]), &[&late]).unwrap();
        let to_second = network.to(address);
        let mut second = std::thread::scope(|scope| {
            let options = Options { connect: patience(), ..Options::default() };
            let second = scope.spawn(move || Connection::open(to_second, &hello(1), &options));
            let ended = loop {
                if let Err(error) = first.progress(&mut |tag, event| {
                    panic!("request {tag} ends in the earlier connection: {event:?}")
                }) {
                    break error;
                }
            };
            assert!(matches!(ended, ConnectionError::Closed | ConnectionError::Io(_)), "{ended}");
            assert!(!second.is_finished(), "a request of the earlier connection is in service");
            drop(gate);
            second.join().unwrap().unwrap()
        });
        assert_eq!(
            read_page(&mut second, 0),
            [0; PAGE_SIZE],
            "a write of the earlier connection landed"
        );
        assert_eq!(read_page(&mut other_lane, 0), [0; PAGE_SIZE]);
    });
}

#[test]
fn refused_greetings_say_why() {
    let fixture = serve(Limits { connections: 2, ..Limits::default() });
    let address = fixture.server.address();
    let refusal = |hello: &Hello| match Connection::open(address, hello, &Options::default()) {
        Err(ConnectionError::Refused(refusal)) => refusal,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("welcomed"),
    };
    let stale = Hello { epoch: Epoch(0), ..hello(1) };
    assert_eq!(refusal(&stale), Refusal::StaleEpoch(Epoch(1)));
    let future = Hello { versions: (VERSIONS.1 + 1, VERSIONS.1 + 9), ..hello(1) };
    assert_eq!(refusal(&future), Refusal::Version(VERSIONS.0, VERSIONS.1));
    let newer_too = Hello { versions: (VERSIONS.0, VERSIONS.1 + 9), ..hello(1) };
    // The donor counts a refused connection for as long as its thread takes to end.
    let mut welcomed = None;
    wait_until("room after two that were refused", || {
        welcomed = Connection::open(address, &newer_too, &Options::default()).ok();
        welcomed.is_some()
    });
    assert_eq!(welcomed.unwrap().welcome().unwrap().version, VERSIONS.1);
}

#[test]
fn a_version_without_owners_is_spoken_without_them() {
    each_way(|network| {
        let fixture = network.serve(Limits::default());
        let open = |space: SpaceId, lane: u64, newest: u16| {
            let hello = Hello { versions: (VERSIONS.0, newest), space, ..hello(lane) };
            Connection::open(network.to(fixture.server.address()), &hello, &Options::default())
        };
        let refused = |refusal| Outcome::Refused(refusal);
        let admit = Request::Admit { node: "customer" };
        let mut new = open(SpaceId(1), 1, OWNERS_SINCE).unwrap();
        assert!(!new.lacks(&admit));
        assert_eq!(new.call(admit, &[]).unwrap(), Outcome::Done);
        assert_eq!(new.call(Request::FreeAll, &[]).unwrap(), refused(Refusal::OtherNode));
        let mut old = open(SpaceId(1), 2, OWNERS_SINCE - 1).unwrap();
        assert_eq!(old.welcome().unwrap().version, OWNERS_SINCE - 1);
        assert_eq!(fixture.shelf.caller.lock().unwrap().1, OWNERS_SINCE - 1);
        assert!(old.lacks(&admit) && !old.lacks(&Request::Renew));
        assert_eq!(old.call(Request::FreeAll, &[]).unwrap(), refused(Refusal::Busy));
        assert!(old.call(admit, &[]).is_err(), "there is no such frame");
        assert!(!old.lacks(&admit), "it is broken, and that is to be found");
        assert_eq!(read_page(&mut new, 0), [0; PAGE_SIZE], "the other one goes on");
        for (newest, refusal) in
            [(OWNERS_SINCE, Refusal::OtherNode), (OWNERS_SINCE - 1, Refusal::Busy)]
        {
            let refused = open(OTHERS, 3, newest).map(drop).unwrap_err();
            let is_told = matches!(refused, ConnectionError::Refused(told) if told == refusal);
            assert!(is_told, "{refused}");
        }
    });
}

#[test]
fn one_connection_too_many_is_refused_and_room_comes_back() {
    let fixture = serve(Limits { connections: 2, ..Limits::default() });
    let address = fixture.server.address();
    let first = connect(address, 1);
    let _second = connect(address, 2);
    // Busy, or a reset when the refusal was overtaken by the end of the connection.
    assert!(Connection::open(address, &hello(3), &Options::default()).is_err());
    drop(first);
    wait_until("room for a third", || {
        Connection::open(address, &hello(3), &Options::default()).is_ok()
    });
}

#[test]
fn silent_and_slow_borrowers_are_cut_off() {
    let short = Duration::from_millis(200);
    // Says nothing.
    let hasty = serve(Limits { handshake: short, ..Limits::default() });
    let mut silent = TcpStream::connect(hasty.server.address()).unwrap();
    assert_eq!(silent.read(&mut [0; 1]).unwrap(), 0);
    // Greets, and then nothing.
    let fixture = serve(Limits { stall: short, idle: short, ..Limits::default() });
    let address = fixture.server.address();
    let mut idle = connect(address, 1);
    let end = loop {
        if let Err(error) = idle.progress(&mut |_, _| {}) {
            break error;
        }
    };
    assert!(matches!(end, ConnectionError::Closed), "{end}");
    // Asks for much and takes nothing.
    let window = WindowLimits { requests: 512, payload_bytes: 256 << 20 };
    let options = Options { window, ..Options::default() };
    let mut greedy = Connection::open(address, &hello(2), &options).unwrap();
    let pages: Vec<u32> = (0..MAX_PAGES as u32).collect();
    for tag in 0..200 {
        let request = Request::Read { extent: EXTENT, pages: &pages };
        if greedy.submit(tag, request, &[]).is_err() {
            break;
        }
    }
    wait_until("all visits over", || fixture.shelf.open.load(Ordering::SeqCst) == 0);
}

#[test]
fn stopping_ends_everything() {
    let fixture = serve(Limits::default());
    let address = fixture.server.address();
    let mut connection = connect(address, 1);
    fixture.server.stop();
    assert_eq!(fixture.shelf.open.load(Ordering::SeqCst), 0);
    let request = Request::Read { extent: EXTENT, pages: &[0] };
    assert!(connection.call(request, &[]).is_err());
    assert!(TcpStream::connect(address).is_err());
}

#[test]
fn nobody_there_is_an_error_within_the_deadline() {
    let unused = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap();
    let options = Options { connect: Duration::from_millis(200), ..Options::default() };
    assert!(matches!(Connection::open(unused, &hello(1), &options), Err(ConnectionError::Io(_))));
    let fixture = serve(Limits::default());
    let chaos = Chaos::before(fixture.server.address(), Plan::default(), 1).unwrap();
    chaos.set_deaf(true);
    assert!(matches!(
        Connection::open(chaos.address(), &hello(1), &options),
        Err(ConnectionError::TimedOut(..))
    ));
    chaos.set_deaf(false);
    assert!(Connection::open(chaos.address(), &hello(1), &Options::default()).is_ok());
}

/// Whatever the network does, a read gives the page or an error, and a write that is acknowledged
/// is there.
#[test]
fn no_fault_of_the_network_gives_wrong_data() {
    each_way(|network| {
        for seed in 0..8u64 {
            let fixture = network.serve(Limits::default());
            let plan = Plan {
                grain_bytes: 512,
                delayed: 20_000,
                delay: Duration::from_micros(300),
                dropped: 4_000,
                corrupted: 8_000,
                cut: 4_000,
                ..Plan::default()
            };
            let chaos = Chaos::before(fixture.server.address(), plan, seed).unwrap();
            let options = Options {
                answer: Duration::from_millis(200),
                connect: Duration::from_millis(200),
                ..Options::default()
            };
            let mut connection = None;
            let mut stored = page(0);
            let mut possible = vec![[0; PAGE_SIZE]];
            for turn in 0..30u8 {
                let open = match connection.take() {
                    Some(open) => open,
                    None => {
                        match Connection::open(network.to(chaos.address()), &hello(1), &options) {
                            Ok(open) => open,
                            Err(_) => continue,
                        }
                    }
                };
                let mut open = open;
                stored = if turn % 2 == 0 { page(turn) } else { stored };
                let sum = page_sum(&stored);
                let write = Request::Write {
                    extent: EXTENT,
                    generation: Generation(1),
                    pages: &[0],
                    sums: &[sum],
                };
                match open.call(write, &[&stored]) {
                    Ok(Outcome::Done) => possible = vec![stored],
                    Ok(Outcome::Refused(Refusal::Corrupt(0))) => {}
                    Ok(other) => panic!("seed {seed}: {other:?}"),
                    Err(_) => {
                        possible.push(stored);
                        continue;
                    }
                }
                match open.call(Request::Read { extent: EXTENT, pages: &[0] }, &[]) {
                    // Corrupted on the way back: the sum tells, as it does the pager.
                    Ok(Outcome::Pages { sums, data }) if sums != [page_sum(&data)] => {}
                    Ok(Outcome::Pages { data, .. }) => {
                        assert!(
                            possible.iter().any(|page| data == page),
                            "seed {seed}, turn {turn}"
                        );
                    }
                    Ok(other) => panic!("seed {seed}: {other:?}"),
                    Err(_) => continue,
                }
                connection = Some(open);
            }
        }
    });
}
