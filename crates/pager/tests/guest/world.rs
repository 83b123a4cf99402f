//! What a machine needs around it: a donor in this process, and a pager in one of its own.

use hecaton_donor::{Donor, DonorConfig, Serving, listen};
use hecaton_memory::Size;
use hecaton_pager::{Guest, PagerConfig, Stats};
use hecaton_uffd::abi::GUEST_RAM_FEATURES;
use hecaton_uffd::{Errno, Uffd};
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

pub(crate) const LOCAL: u64 = 16 << 20;
const LENT: u64 = 512 << 20;
const PATIENCE: Duration = Duration::from_secs(120);

/// Whether guest RAM can be paged here.
pub(crate) fn userfaultfd_is_usable() -> Result<u64, Errno> {
    let uffd = Uffd::open()?;
    let features = uffd.api(GUEST_RAM_FEATURES);
    // SAFETY: just opened, used nowhere else.
    unsafe { libc::close(uffd.0) };
    features
}

fn own_program(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program has a path"));
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

pub(crate) fn be_the_pager() -> ExitCode {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).expect("the test says what to do");
    let config: PagerConfig = serde_json::from_str(&line).expect("the test knows how");
    match hecaton_pager::run(&config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the pager ends: {error}");
            ExitCode::FAILURE
        }
    }
}

/// A donor and a pager.
pub(crate) struct World {
    donor: Donor,
    serving: Option<Serving>,
    dir: tempfile::TempDir,
    pub(crate) socket: PathBuf,
    pager: Child,
    launch: Option<ChildStdin>,
}

impl World {
    pub(crate) fn start() -> World {
        World::with_guest(|_| Guest::Qemu)
    }

    pub(crate) fn with_guest(guest: impl FnOnce(&std::path::Path) -> Guest) -> World {
        let dir = tempfile::tempdir().unwrap();
        let config = DonorConfig::new("d1", ([127, 0, 0, 1], 0).into(), Size(LENT));
        let donor = Donor::open(&config, None).unwrap();
        let serving = donor.serve(listen(config.listen).unwrap()).unwrap();
        let socket = dir.path().join("pager.sock");
        let config = PagerConfig {
            consumer: "machine".into(),
            space: 7,
            local_bytes: LOCAL,
            socket: socket.clone(),
            donors: vec![hecaton_pager::Donor { name: "d1".into(), address: serving.address() }],
            node: None,
            lease: Duration::from_secs(60),
            guest: Some(guest(dir.path())),
        };
        let mut pager = own_program(&["be-the-pager"]).spawn().unwrap();
        let mut launch = pager.stdin.take().unwrap();
        writeln!(launch, "{}", serde_json::to_string(&config).unwrap()).unwrap();
        let mut ready = String::new();
        BufReader::new(pager.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        assert_eq!(ready, "ready\n");
        let serving = Some(serving);
        World { donor, serving, dir, socket, pager, launch: Some(launch) }
    }

    /// The donor's host is lost, and comes back with empty memory.
    pub(crate) fn lose_the_donor(&mut self) {
        let address = self.serving.take().expect("there is a donor").address();
        let config = DonorConfig::new("d1", address, Size(LENT));
        self.donor = Donor::open(&config, None).unwrap();
        self.serving = Some(self.donor.serve(listen(address).unwrap()).unwrap());
    }

    /// No further machine, and a pager that has failed its last one.
    pub(crate) fn end_with_failure(mut self) {
        self.launch = None;
        let deadline = Instant::now() + PATIENCE;
        while self.pager.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "the pager does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(!self.pager.wait().unwrap().success());
    }

    /// A path for a file of the test's.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn control(&self, request: &str) -> Stats {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let answer = self.say(request);
            if let Ok(stats) = serde_json::from_str(&answer) {
                return stats;
            }
            // A pager that is being replaced does not answer.
            assert!(Instant::now() < deadline, "{request}: {answer}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// What the control socket answers.
    pub(crate) fn say(&self, request: &str) -> String {
        ask(&hecaton_pager::control_socket(&self.socket), request)
    }

    pub(crate) fn stats(&self) -> Stats {
        self.control("\"stats\"")
    }

    /// Pages that the donor has given to the machine's space.
    pub(crate) fn lent_pages(&self) -> u64 {
        let snapshot = self.donor.snapshot();
        snapshot.pages - snapshot.free_pages
    }

    fn worker(&self) -> Option<i32> {
        let keeper = self.pager.id();
        let path = format!("/proc/{keeper}/task/{keeper}/children");
        std::fs::read_to_string(path).ok()?.split_whitespace().next()?.parse().ok()
    }

    /// Kills the pager, once it has one that serves.
    pub(crate) fn kill_worker(&self) {
        self.stats();
        let worker = self.worker().expect("the keeper has a worker");
        // SAFETY: signals a child of our child.
        assert_eq!(unsafe { libc::kill(worker, libc::SIGKILL) }, 0);
    }

    /// Memory files of machines that the pager has open.
    pub(crate) fn pager_memory_files(&self) -> usize {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", self.pager.id())).unwrap();
        let names = fds.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
        names.filter(|name| name.to_string_lossy().contains("hecaton-ram-test")).count()
    }

    pub(crate) fn wait_until(&self, what: &str, condition: impl Fn() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !condition() {
            assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// No further machine: the pager gives everything back and ends.
    pub(crate) fn end(mut self) {
        self.launch = None;
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.pager.try_wait().unwrap() {
                break status;
            }
            assert!(Instant::now() < deadline, "the pager does not end");
            std::thread::sleep(Duration::from_millis(10));
        };
        assert!(status.success(), "the pager ended with {status}");
        self.wait_until("all extents are back", || self.lent_pages() == 0);
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // A test that failed leaves them behind.
        if let Some(worker) = self.worker() {
            // SAFETY: signals a child of our child; the keeper goes first, to start no other.
            unsafe {
                libc::kill(self.pager.id() as i32, libc::SIGKILL);
                libc::kill(worker, libc::SIGKILL);
            }
        }
        let _ = self.pager.wait();
    }
}

fn ask(path: &std::path::Path, request: &str) -> String {
    let mut answer = String::new();
    if let Ok(mut stream) = UnixStream::connect(path) {
        let _ = stream.set_read_timeout(Some(PATIENCE));
        let _ = writeln!(stream, "{request}");
        let _ = stream.read_to_string(&mut answer);
    }
    answer
}

/// The machine's process.
pub(crate) struct Machine {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Machine {
    pub(crate) fn start(world: &World, pages: usize) -> Machine {
        let socket = world.socket.to_str().unwrap();
        Machine::spawn(&["be-the-machine", socket, &pages.to_string()])
    }

    /// This program with these arguments, once it has handed its memory over.
    pub(crate) fn spawn(arguments: &[&str]) -> Machine {
        let mut child = own_program(arguments).spawn().unwrap();
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let mut machine = Machine { child, orders, answers };
        machine.wait();
        machine
    }

    pub(crate) fn begin(&mut self, order: &str) {
        writeln!(self.orders.as_mut().unwrap(), "{order}").unwrap();
    }

    pub(crate) fn wait(&mut self) {
        let mut answer = String::new();
        self.answers.read_line(&mut answer).unwrap();
        assert_eq!(answer, "done\n", "the machine has found wrong memory, or died: see above");
    }

    pub(crate) fn order(&mut self, order: &str) {
        self.begin(order);
        self.wait();
    }

    /// Whether its process is there.
    pub(crate) fn lives(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    pub(crate) fn end(mut self) {
        self.orders = None;
        assert!(self.child.wait().unwrap().success());
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
