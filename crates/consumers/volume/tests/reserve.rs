//! Once a volume is served, its writes take nothing from the kernel: all that they allocate fits in
//! what the heap was given before. Without a harness, because the heap must be this test's alone.

use hecaton_block::requests::reserve::{HEAP_BYTES, reserve_heap};
use hecaton_block::{State, Volume, VolumeConfig};
use hecaton_donor::{Donor, DonorConfig};
use hecaton_memory::{PAGE_SIZE, Size, random_u64};
use hecaton_space::{Directory, DonorAddress, Site};
use libtest_mimic::{Arguments, Trial};
use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{self, BufRead as _, BufReader};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use std::{env, thread};

/// As many as a file has threads, each with the longest request.
const WRITERS: u64 = 16;
const REQUEST_BYTES: usize = 256 << 10;
const ROUNDS: u64 = 60;
const VOLUME_BYTES: u64 = 128 << 20;

/// Argument that makes this test a donor.
const LEND: &str = "lend";

/// All of them are used, by connections of their own.
const DONORS: usize = 4;

/// Counts what is allocated at a time.
struct Counting;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

fn note(bytes: usize) {
    let now = ALLOCATED.fetch_add(bytes, Relaxed) + bytes;
    MOST.fetch_max(now, Relaxed);
}

// SAFETY: all of it is the system's, and the counters allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        ALLOCATED.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

struct Known(Vec<SocketAddr>);

impl Directory for Known {
    fn donors(&self) -> Vec<DonorAddress> {
        let address = |(number, addr): (usize, &SocketAddr)| {
            let name = format!("d{number}");
            DonorAddress { site: Site::unplaced(&name), name, addr: *addr }
        };
        self.0.iter().enumerate().map(address).collect()
    }
}

/// Bytes that the heap has from the kernel.
#[cfg(target_env = "gnu")]
fn heap_bytes() -> usize {
    // SAFETY: it only reads.
    let info = unsafe { libc::mallinfo2() };
    info.arena + info.hblkhd
}

#[cfg(not(target_env = "gnu"))]
fn heap_bytes() -> usize {
    0
}

/// A donor of this process, until its standard input ends.
fn lend() {
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let donor = Donor::open(&DonorConfig::new("d", at, Size(VOLUME_BYTES)), None).unwrap();
    let serving = donor.serve(TcpListener::bind(at).unwrap()).unwrap();
    println!("{}", serving.address());
    io::copy(&mut io::stdin(), &mut io::sink()).unwrap();
}

/// A process that lends.
struct Lender {
    process: Child,
    address: SocketAddr,
}

impl Lender {
    fn start() -> Lender {
        let mut command = Command::new(env::current_exe().unwrap());
        let command = command.arg(LEND).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Lender { process, address: line.trim().parse().unwrap() }
    }
}

impl Drop for Lender {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

fn main() -> ExitCode {
    if env::args().any(|argument| argument == LEND) {
        lend();
        return ExitCode::SUCCESS;
    }
    let test = Trial::test("writers_never_ask_the_kernel_for_memory", || {
        writers_never_ask_the_kernel_for_memory();
        Ok(())
    });
    // On this thread, whose heap is the one that was reserved.
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    libtest_mimic::run(&arguments, vec![test]).exit_code()
}

fn writers_never_ask_the_kernel_for_memory() {
    reserve_heap();
    // Processes of their own: what they allocate is not the volume's.
    let donors: Vec<Lender> = (0..DONORS).map(|_| Lender::start()).collect();
    let known = Known(donors.iter().map(|donor| donor.address).collect());
    let pages = VOLUME_BYTES / PAGE_SIZE as u64;
    let config = VolumeConfig {
        name: "disk".into(),
        space: random_u64(),
        pages,
        spill: None,
        limit_bytes: None,
        multi_writer: false,
        write_buffer_bytes: None,
        encrypt: true,
        snapshot_of: None,
        reads_from: None,
        for_swap: true,
        copies: 2,
        site: Site::default(),
        donors: Vec::new(),
        tls_dir: None,
        lease: Duration::from_secs(30),
        donor_patience: Duration::from_secs(5),
        scrub_bytes_per_s: 1 << 30,
        copying_bytes_per_s: 1 << 30,
        failover: Duration::from_millis(150),
    };
    let volume = Volume::open(config, Arc::new(known), State::create(pages).unwrap()).unwrap();
    let buffers: Vec<Vec<u8>> =
        (0..WRITERS).map(|writer| vec![writer as u8 + 1; REQUEST_BYTES]).collect();

    let (before, heap_before) = (ALLOCATED.load(Relaxed), heap_bytes());
    MOST.store(before, Relaxed);
    thread::scope(|scope| {
        for (writer, buffer) in buffers.iter().enumerate() {
            let volume = &volume;
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let request = (round * 7 + writer as u64) * REQUEST_BYTES as u64;
                    volume.write(request % VOLUME_BYTES, buffer).unwrap();
                }
            });
        }
    });
    let (most, grown) = (MOST.load(Relaxed) - before, heap_bytes() - heap_before);
    println!(
        "{WRITERS} writers had {} at once, and the heap grew by {grown} bytes",
        Size(most as u64)
    );
    assert!(most < HEAP_BYTES / 2, "{most} bytes of {HEAP_BYTES}");
    assert_eq!(grown, 0, "the kernel was asked for memory");
    volume.release().unwrap();
}
