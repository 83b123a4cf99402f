//! Surrounds a test VM with a donor in this process and a pager in its own.

use hecaton_donor::{Donor, DonorConfig, Serving, listen};
use hecaton_memory::Size;
use hecaton_pager::{Guest, PagerConfig, PagerEvent, PagerStart, Stats, channel};
use hecaton_testkit::{patience, wait_until, wait_until_seen};
use hecaton_uffd::abi::GUEST_RAM_FEATURES;
use hecaton_uffd::{Errno, Uffd};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read as _, Write as _};
use std::net::Shutdown;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};

pub(crate) const LOCAL: u64 = 16 << 20;
const LENT: u64 = 512 << 20;

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
    match hecaton_pager::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("the pager ends: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The part of a node that a pager needs: holds its descriptors, and starts a successor.
struct Node {
    config: PagerConfig,
    held: BTreeMap<String, OwnedFd>,
    pid: Option<u32>,
    /// The stream to the pager, while further VMs may come.
    launch: Option<UnixStream>,
    ended: Option<ExitStatus>,
}

fn supervise(node: &Mutex<Node>) {
    loop {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut child =
            own_program(&["be-the-pager"]).stdin(OwnedFd::from(theirs)).spawn().unwrap();
        start(&mut node.lock().unwrap(), &child, &ours);
        let mut ready = String::new();
        let output = child.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut ready).unwrap();
        hold_what_comes(node, ours);
        let status = child.wait().unwrap();
        let mut node = node.lock().unwrap();
        node.pid = None;
        if status.code().is_some_and(|code| code != hecaton_pager::PANICKED) {
            node.held.clear();
            node.ended = Some(status);
            return;
        }
    }
}

fn start(node: &mut Node, child: &Child, stream: &UnixStream) {
    let start = PagerStart { config: node.config.clone(), held: node.held.len() };
    // Fails if the pager was killed at once.
    let _ = channel::send(stream, &start, &[]);
    for (label, fd) in &node.held {
        let _ = channel::send(stream, &[label], &[fd.as_fd()]);
    }
    node.pid = Some(child.id());
    match node.launch {
        Some(_) => node.launch = Some(stream.try_clone().unwrap()),
        None => drop(stream.shutdown(Shutdown::Write)),
    }
}

fn hold_what_comes(node: &Mutex<Node>, stream: UnixStream) {
    let mut receiver = channel::Receiver::new(stream);
    while let Ok(Some(event)) = receiver.receive::<PagerEvent>() {
        let mut node = node.lock().unwrap();
        match event {
            PagerEvent::HoldFds(labels) => {
                let fds = receiver.take_fds(labels.len()).unwrap();
                node.held.extend(labels.into_iter().zip(fds));
            }
            PagerEvent::DropFds(labels) => labels.iter().for_each(|l| drop(node.held.remove(l))),
            PagerEvent::Failed(_) | PagerEvent::Over => {}
        }
    }
}

/// A donor and a pager.
pub(crate) struct World {
    donor: Donor,
    serving: Option<Serving>,
    dir: tempfile::TempDir,
    pub(crate) socket: PathBuf,
    node: Arc<Mutex<Node>>,
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
            donors: vec![hecaton_pager::Donor {
                name: "d1".into(),
                node: "n1".into(),
                location: None,
                address: serving.address(),
            }],
            guest: Some(guest(dir.path())),
            ..PagerConfig::new("machine".into(), 7, LOCAL, socket.clone())
        };
        let (_, placeholder) = UnixStream::pair().unwrap();
        let (held, launch) = (BTreeMap::new(), Some(placeholder));
        let node = Node { config, held, pid: None, launch, ended: None };
        let node = Arc::new(Mutex::new(node));
        std::thread::spawn({
            let node = node.clone();
            move || supervise(&node)
        });
        let world = World { donor, serving: Some(serving), dir, socket, node };
        world.stats();
        world
    }

    /// Replaces the donor by one with empty memory, as if its host was lost and came back.
    pub(crate) fn lose_the_donor(&mut self) {
        let address = self.serving.take().expect("there is a donor").address();
        let config = DonorConfig::new("d1", address, Size(LENT));
        self.donor = Donor::open(&config, None).unwrap();
        self.serving = Some(self.donor.serve(listen(address).unwrap()).unwrap());
    }

    /// Tells the pager that no further VM comes, and waits for its exit status.
    fn wait_for_end(&self) -> ExitStatus {
        let launch = self.node.lock().unwrap().launch.take();
        drop(launch.map(|stream| stream.shutdown(Shutdown::Write)));
        wait_until("the pager ends", || self.node.lock().unwrap().ended.is_some());
        self.node.lock().unwrap().ended.expect("it was waited for")
    }

    /// Tells the pager that no further VM comes, and expects it to fail.
    pub(crate) fn end_with_failure(self) {
        assert!(!self.wait_for_end().success());
    }

    /// Path of a file of the test.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn control(&self, request: &str) -> Stats {
        // A pager that is being replaced does not answer.
        wait_until_seen(&format!("the pager answers {request}"), || {
            let answer = self.say(request);
            serde_json::from_str(&answer).map_err(|error| format!("{error}: `{answer}`"))
        })
    }

    /// Sends a request to the control socket, and returns the answer.
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

    fn pager(&self) -> Option<u32> {
        self.node.lock().unwrap().pid
    }

    /// Kills the pager, once it serves.
    pub(crate) fn kill_pager(&self) {
        self.stats();
        let pager = self.pager().expect("it has just answered");
        // SAFETY: signals our child.
        assert_eq!(unsafe { libc::kill(pager as i32, libc::SIGKILL) }, 0);
    }

    /// Memory files of machines that the pager has open.
    pub(crate) fn pager_memory_files(&self) -> usize {
        let pager = self.pager().expect("there is a pager");
        let fds = std::fs::read_dir(format!("/proc/{pager}/fd")).unwrap();
        let names = fds.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
        names.filter(|name| name.to_string_lossy().contains("hecaton-ram-test")).count()
    }

    /// Descriptors that the node holds for the pager.
    pub(crate) fn held(&self) -> usize {
        self.node.lock().unwrap().held.len()
    }

    /// Tells the pager that no further VM comes: it gives everything back and ends.
    pub(crate) fn end(self) {
        let status = self.wait_for_end();
        assert!(status.success(), "the pager ended with {status}");
        wait_until("all extents are back", || self.lent_pages() == 0);
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // A failed test leaves a pager behind. With 0 bytes of local memory, its successor fails.
        let Ok(mut node) = self.node.lock() else { return };
        node.config.local_bytes = 0;
        if let Some(pager) = node.pid {
            // SAFETY: signals our child.
            unsafe { libc::kill(pager as i32, libc::SIGKILL) };
        }
    }
}

fn ask(path: &std::path::Path, request: &str) -> String {
    let mut answer = String::new();
    if let Ok(mut stream) = UnixStream::connect(path) {
        let _ = stream.set_read_timeout(Some(patience()));
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

    /// Starts this program with these arguments, and waits until its memory is handed over.
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

    /// Whether the VM's process is running.
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
