//! The manager with a host at the other end of its port, real applications, and its API.

use crate::host::{self, Host};
use hecaton_guest::{
    Address, ApiServer, ApplicationStatus, Config, Manager, Memory, ServeError, State,
};
use hecaton_testkit::{patience, wait_for, wait_until, wait_until_seen};
use hecaton_vm::guest_port::{GuestMessage, HostMessage, Notice};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use std::{fs, io, thread};
use tempfile::TempDir;
use tokio::runtime::Runtime;

const G: u64 = 1 << 30;
const M: u64 = 1 << 20;

/// A manager in a directory of its own, with memory as the test likes.
struct Guest {
    dir: TempDir,
    memory: Arc<Mutex<Memory>>,
    manager: Option<Manager>,
    host: UnixListener,
    config: String,
}

impl Guest {
    /// `config` with `DIR` for its directory.
    fn start(total_bytes: u64, config: &str) -> Guest {
        let dir = tempfile::tempdir().unwrap();
        let host = UnixListener::bind(dir.path().join("port")).unwrap();
        let config = config.replace("DIR", dir.path().to_str().unwrap());
        let memory = Memory { total_bytes, available_bytes: total_bytes };
        let memory = Arc::new(Mutex::new(memory));
        let mut guest = Guest { dir, memory, manager: None, host, config };
        guest.restart();
        guest
    }

    fn restart(&mut self) {
        if let Some(manager) = self.manager.take() {
            manager.stop();
        }
        let config = Config::parse(&self.config, Path::new("guest.toml")).expect("a configuration");
        let memory = Arc::clone(&self.memory);
        let manager = Manager::start(config, Some(self.dir.path().join("port")), move || {
            Ok(*memory.lock().unwrap())
        });
        self.manager = Some(manager.expect("started"));
    }

    /// Takes the manager's next connection, and its greeting.
    fn greeted(&self) -> Host {
        let mut host = Host::new(self.host.accept().unwrap().0);
        assert_eq!(host.hear(), GuestMessage::Hello);
        host
    }

    fn has(&self, total_bytes: u64, available_bytes: u64) {
        *self.memory.lock().unwrap() = Memory { total_bytes, available_bytes };
    }

    fn manager(&self) -> &Manager {
        self.manager.as_ref().unwrap()
    }

    /// Waits until it stands so.
    fn until(&self, what: &str, is_so: impl Fn(&State) -> bool) -> State {
        wait_until_seen(what, || {
            let state = self.manager().state();
            if is_so(&state) { Ok(state) } else { Err(format!("{state:?}")) }
        })
    }

    fn until_settled(&self, limits: &[u64]) -> State {
        self.until("settled", |state| {
            let mut all = state.applications.iter().zip(limits);
            !state.applications.is_empty()
                && all.all(|(one, limit)| {
                    one.limit_bytes == *limit && one.status == ApplicationStatus::Settled
                })
        })
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if let Some(manager) = self.manager.take() {
            manager.stop();
        }
    }
}

/// A program that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// None if it is not installed.
fn run(program: &str, args: &[&str]) -> Option<Running> {
    let command = Command::new(program).args(args).stdout(Stdio::null()).spawn();
    match command {
        Ok(child) => Some(Running(child)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => panic!("{program}: {error}"),
    }
}

fn connect(path: &Path) -> BufReader<UnixStream> {
    let what = format!("a connection to {}", path.display());
    BufReader::new(wait_until_seen(&what, || UnixStream::connect(path)))
}

/// Sends lines with a value behind each, and reads an answer to each.
fn fill(stream: &mut BufReader<UnixStream>, count: usize, command: impl Fn(usize) -> String) {
    for number in 0..count {
        let command = command(number);
        stream.get_mut().write_all(command.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_line(&mut answer).unwrap();
        assert!(["+OK\r\n", "STORED\r\n"].contains(&&*answer), "{answer}");
    }
}

/// Sends a command, and returns the lines of its answer up to the one that `is_last` accepts.
fn ask(
    stream: &mut BufReader<UnixStream>,
    command: &str,
    is_last: impl Fn(&str) -> bool,
) -> String {
    stream.get_mut().write_all(format!("{command}\r\n").as_bytes()).unwrap();
    let mut answer = String::new();
    loop {
        let begin = answer.len();
        assert!(stream.read_line(&mut answer).unwrap() > 0, "{answer}");
        if is_last(answer[begin..].trim_end()) {
            return answer;
        }
    }
}

#[test]
fn a_hook_and_a_caller_of_the_api_are_told_in_order_before_the_host_is_answered() {
    let guest = Guest::start(
        9 * G,
        "reserve = '1G'\nfree = '0'\npatience-s = 60\n\
         [[application]]\nname = 'first'\nhook = { command = ['sh', '-c', '''\n\
         echo $HECATON_APPLICATION $HECATON_REASON $HECATON_LIMIT_BYTES $HECATON_TARGET_BYTES >> DIR/told\n\
         test $HECATON_DEADLINE_MS -gt 0''']}\n\
         [[application]]\nname = 'second'\nmax = '4G'\napi = {}\n",
    );
    let mut host = guest.greeted();
    let runtime = Runtime::new().unwrap();
    let address: Address = "127.0.0.1:0".parse().unwrap();
    let server = runtime.block_on(ApiServer::start(&address, guest.manager().router())).unwrap();
    let url = format!("http://{}/v1", server.address());
    let get = |query: &str| {
        let mut answer = ureq::get(format!("{url}/state{query}")).call().expect("answered");
        answer.body_mut().read_json::<State>().expect("a state")
    };
    let ready = |name: &str, order: u64| {
        let url = format!("{url}/applications/{name}/ready");
        match ureq::post(url).send_json(serde_json::json!({ "order": order })) {
            Ok(answer) => answer.status().as_u16(),
            Err(ureq::Error::StatusCode(status)) => status,
            Err(error) => panic!("{error}"),
        }
    };
    let second = |state: &State| state.applications[1].clone();
    let drains = |state: &State| second(state).status == ApplicationStatus::Draining;
    let state = guest.until("the second is told", drains);
    assert_eq!(second(&state).limit_bytes, 4 * G);
    assert_eq!(ready("second", 1), 204);
    let state = guest.until_settled(&[4 * G, 4 * G]);

    let begun = Instant::now();
    let same = get(&format!("?since={}&wait=1s", state.version));
    assert!(same.version == state.version && begun.elapsed() >= Duration::from_secs(1));
    let waiter = thread::spawn({
        let url = format!("{url}/state?since={}&wait=300s", state.version);
        move || ureq::get(url).call().unwrap().body_mut().read_json::<State>().unwrap()
    });
    host.say(&HostMessage::Target { id: 5, size_bytes: 10 * G, target_bytes: 4 * G });
    // Before the 300 s are over.
    let limit = patience().min(Duration::from_secs(240));
    wait_for("the waiter is told of the change", limit, || {
        waiter.is_finished().then_some(()).ok_or("its request is not answered")
    })
    .unwrap();
    let first_news = waiter.join().unwrap();
    assert!(first_news.version > state.version, "{first_news:?}");
    let state =
        guest.until("the second is told", |state| drains(state) && second(state).order == 2);
    assert_eq!(second(&state).limit_bytes, 2 * G);
    let available = GuestMessage::Giving { id: 5, size_bytes: 4 * G };
    assert_eq!(host.hear(), available, "the first has given back");
    assert!(host.is_silent(), "the second has not given back");
    assert_eq!([ready("nobody", 2), ready("first", 2), ready("second", 1)], [404, 409, 409]);
    assert_eq!(ready("second", 2), 204);
    let answer = host.hear();
    let expected = GuestMessage::Ready { id: 5, available_bytes: 9 * G, late: vec![] };
    assert_eq!(answer, expected);
    let told = fs::read_to_string(guest.file("told")).unwrap();
    let lines = ["first start 4294967296 9663676416", "first shrink 0 3221225472"];
    assert_eq!(told.lines().collect::<Vec<_>>(), lines);

    let status = |path: &str| match ureq::get(format!("{url}{path}")).call() {
        Err(ureq::Error::StatusCode(status)) => status,
        other => panic!("{path}: {other:?}"),
    };
    assert_eq!(status("/states"), 404);
    for query in ["wait=30", "wait=30s", "since=1&wait=301s", "since=x", "sinse=1"] {
        assert_eq!(status(&format!("/state?{query}")), 400, "{query}");
    }
    // A page whose name was made to point here.
    let rebound = ureq::get(format!("{url}/state")).header("host", "evil.example").call();
    assert!(matches!(rebound, Err(ureq::Error::StatusCode(421))), "{rebound:?}");
    runtime.block_on(server.stop());
}

#[test]
fn a_manager_that_is_started_again_learns_what_is_so() {
    let mut guest = Guest::start(
        4 * G,
        "reserve = '1G'\n[[application]]\nname = 'a'\nhook = { command = ['sh', '-c', \
         'echo $HECATON_REASON >> DIR/told'] }\n",
    );
    let warning = HostMessage::Evict { id: 1, within_ms: 30_000 };
    let mut host = guest.greeted();
    guest.until_settled(&[3 * G]);
    host.say(&warning);
    let ready = GuestMessage::Ready { id: 1, available_bytes: 4 * G, late: vec![] };
    assert_eq!(host.hear(), ready);

    guest.restart();
    let mut host = guest.greeted();
    host.say(&warning);
    assert_eq!(host.hear(), ready);
    // The host's agent is killed, and the next one has decided otherwise.
    drop(host);
    let mut host = guest.greeted();
    host.say(&HostMessage::Cancelled { what: Notice::Evict });
    guest.until("spared", |state| state.eviction.is_none());
    guest.until_settled(&[3 * G]);
    let path = guest.file("told");
    // Nobody waits for a hook that has nothing to give back.
    guest.until("told", |_| fs::read_to_string(&path).unwrap().ends_with("spared\n"));
    let told = fs::read_to_string(&path).unwrap();
    let reasons: Vec<_> = told.lines().collect();
    // The second may have been told of its start before it heard of the eviction.
    let (first, rest) = reasons.split_at(2);
    assert_eq!(first, ["start", "eviction"]);
    assert!(
        rest == ["eviction", "spared"] || rest == ["start", "eviction", "spared"],
        "{reasons:?}"
    );
}

#[test]
fn a_hook_that_hangs_is_ended_and_holds_up_neither_the_host_nor_the_end() {
    let mut guest = Guest::start(
        4 * G,
        "reserve = '1G'\nfree = '0'\npatience-s = 1\n[[application]]\nname = 'slow'\n\
         hook = { command = ['sh', '-c', 'sleep 1000 & echo $! > DIR/pid; wait'], timeout-s = 2 }\n",
    );
    let mut host = guest.greeted();
    host.say(&HostMessage::Target { id: 1, size_bytes: 4 * G, target_bytes: 3 * G });
    let late = vec!["slow".to_owned()];
    let ready = GuestMessage::Ready { id: 1, available_bytes: 4 * G, late };
    assert_eq!(host.hear_the_end(), ready);
    let state = guest.until("failed", |state| state.applications[0].failure.is_some());
    let failure = state.applications[0].failure.clone().unwrap();
    assert!(failure.contains("more than 2 s"), "{failure}");
    // It is tried again; what that has started does not outlive the manager.
    let _ = fs::remove_file(guest.file("pid"));
    guest.until("another try", |_| {
        fs::read_to_string(guest.file("pid")).is_ok_and(|text| text.ends_with('\n'))
    });
    let pid = fs::read_to_string(guest.file("pid")).unwrap();
    let manager = guest.manager.take().unwrap();
    let stopping = thread::spawn(move || manager.stop());
    wait_until("the manager stops", || stopping.is_finished());
    stopping.join().unwrap();
    // The process was killed, and may not have died yet.
    wait_until_seen("the process of the hook is gone", || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", pid.trim())).unwrap_or_default();
        if stat.is_empty() || stat.contains(") Z ") { Ok(()) } else { Err(stat) }
    });
}

#[test]
fn redis_drops_keys_until_it_fits() {
    let guest = Guest::start(
        1200 * M,
        "reserve = '1G'\nfree = '0'\npatience-s = 60\n[[application]]\nname = 'cache'\n\
         redis = { address = 'unix:DIR/redis', password-file = 'DIR/password' }\n",
    );
    let socket = guest.file("redis");
    let path = socket.to_str().unwrap();
    let args = ["--port", "0", "--unixsocket", path, "--save", "", "--requirepass", "s e"];
    let policy = ["--maxmemory-policy", "allkeys-random"];
    let Some(_server) = run("redis-server", &[&args[..], &policy].concat()) else {
        return println!("skipped: redis_drops_keys_until_it_fits: redis-server is not installed");
    };
    let mut client = connect(&socket);
    fs::write(guest.file("password"), "wrong\n").unwrap();
    let failure = |state: &State| state.applications[0].failure.clone().unwrap_or_default();
    let state = guest.until("refused", |state| failure(state).contains("refused"));
    assert!(!failure(&state).contains("wrong"), "{}", failure(&state));
    fs::write(guest.file("password"), "s e\n").unwrap();
    guest.until_settled(&[176 * M]);
    let is_ok = |line: &str| line == "+OK";
    ask(&mut client, "AUTH \"s e\"", is_ok);
    let value = "x".repeat(50_000);
    fill(&mut client, 1600, |key| format!("SET key{key} {value}\r\n"));
    let used = |client: &mut BufReader<UnixStream>| {
        let info = ask(client, "INFO memory", |line| line.starts_with("lazyfreed_objects"));
        let field = |name: &str| {
            let line = info.lines().find_map(|line| line.strip_prefix(name)).expect(name);
            line.trim().parse::<u64>().expect("a number")
        };
        (field("used_memory:"), field("maxmemory:"))
    };
    let (full, limit) = used(&mut client);
    assert!(full > 80_000_000 && limit == 176 * M, "{full} of {limit}");

    let mut host = guest.greeted();
    host.say(&HostMessage::Target { id: 1, size_bytes: 1200 * M, target_bytes: 1064 * M });
    let GuestMessage::Ready { id: 1, late, .. } = host.hear_the_end() else { panic!("no answer") };
    assert_eq!(late, [""; 0]);
    let (left, limit) = used(&mut client);
    assert!(left <= 40 * M && limit == 40 * M, "{left} of {limit}");

    // Its policy is another one now, and it has nothing that it could drop.
    ask(&mut client, "CONFIG SET maxmemory-policy noeviction", is_ok);
    guest.has(1034 * M, 1034 * M);
    let state = guest.until("refused", |state| !failure(state).is_empty());
    assert!(failure(&state).contains("maxmemory-policy is noeviction"), "{}", failure(&state));
    ask(&mut client, "CONFIG SET maxmemory-policy allkeys-lru", is_ok);
    guest.until_settled(&[10 * M]);
}

#[test]
fn memcached_gives_its_pages_back() {
    let guest = Guest::start(
        1400 * M,
        "reserve = '1G'\nfree = '0'\npatience-s = 60\n[[application]]\nname = 'cache'\n\
         memcached = { address = 'unix:DIR/memcached' }\n",
    );
    let socket = guest.file("memcached");
    let Some(_server) =
        run("memcached", &["-s", socket.to_str().unwrap(), "-m", "64", "-u", "root"])
    else {
        return println!("skipped: memcached_gives_its_pages_back: memcached is not installed");
    };
    let mut client = connect(&socket);
    guest.until_settled(&[376 * M]);
    for size in [10_000, 40_000] {
        let value = "x".repeat(size);
        let count = 100_000_000 / size;
        fill(&mut client, count, |key| format!("set {size}.{key} 0 0 {size}\r\n{value}\r\n"));
    }
    let held = |client: &mut BufReader<UnixStream>| {
        let stats = ask(client, "stats slabs", |line| line == "END");
        let line = stats.lines().find_map(|line| line.strip_prefix("STAT total_malloced "));
        line.expect("there is one").parse::<u64>().expect("a number")
    };
    let full = held(&mut client);
    assert!(full > 190_000_000, "{full}: above the limit that it was started with");
    guest.has(1088 * M, 1088 * M);
    guest.until_settled(&[64 * M]);
    let left = held(&mut client);
    assert!(left <= 64 * M, "{left}");
}

#[test]
fn a_heap_is_given_its_hint() {
    let guest = Guest::start(
        1224 * M,
        "reserve = '1G'\nfree = '0'\npatience-s = 60\n[[application]]\nname = 'java'\nmax = '128M'\n\
         jvm = { pid-file = 'DIR/pid' }\n",
    );
    let source = guest.file("Idle.java");
    fs::write(
        &source,
        "public class Idle { public static void main(String[] a) throws Exception {\n\
         System.in.read(); Thread.sleep(1000000); } }\n",
    )
    .unwrap();
    let jcmd = |pid: &str, words: &[&str]| Command::new("jcmd").arg(pid).args(words).output();
    if jcmd("0", &["help"]).is_err() {
        return println!("skipped: a_heap_is_given_its_hint: jcmd is not installed");
    }
    let Some(java) = run("java", &["-Xmx128m", source.to_str().unwrap()]) else {
        return println!("skipped: a_heap_is_given_its_hint: java is not installed");
    };
    let pid = java.0.id().to_string();
    fs::write(guest.file("pid"), "none").unwrap();
    let failure = |state: &State| state.applications[0].failure.clone().unwrap_or_default();
    guest.until("no number", |state| failure(state).contains("`none`"));
    fs::write(guest.file("pid"), &pid).unwrap();
    guest.until_settled(&[128 * M]);
    guest.has(1064 * M, 1064 * M);
    guest.until_settled(&[40 * M]);
    let flags = jcmd(&pid, &["VM.flags", "-all"]).unwrap();
    let flags = String::from_utf8_lossy(&flags.stdout).into_owned();
    let flag = flags.lines().find(|line| line.contains(" SoftMaxHeapSize ")).expect("it is listed");
    assert!(flag.contains("41943040"), "{flag}");
}

#[test]
fn a_socket_that_was_left_is_replaced_and_no_other() {
    let guest = Guest::start(4 * G, "reserve = '1G'\n[[application]]\nname = 'a'\napi = {}\n");
    let runtime = Runtime::new().unwrap();
    let start = |text: &str| {
        let address: Address = text.parse().unwrap();
        runtime.block_on(ApiServer::start(&address, guest.manager().router()))
    };
    let path = guest.file("api");
    let text = format!("unix:{}", path.display());
    drop(UnixListener::bind(&path).unwrap());
    let server = start(&text).expect("its place is taken");
    let Err(ServeError::InUse(_)) = start(&text) else { panic!("somebody listens there") };
    let mut client = connect(&path);
    client.get_mut().write_all(b"GET /v1/state HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.0 200") && answer.contains("\"name\":\"a\""), "{answer}");
    runtime.block_on(server.stop());
    assert!(!path.exists());
    fs::write(&path, "a file of somebody").unwrap();
    let Err(ServeError::InUse(_)) = start(&text) else { panic!("a file is there") };
    let Err(ServeError::Reachable(_)) = start("0.0.0.0:0") else { panic!("others reach it") };
    let Err(ServeError::Name(_)) = start("localhost:0") else { panic!("a name") };
}

#[test]
fn connections_beyond_the_bound_wait_for_a_place() {
    let guest = Guest::start(4 * G, "reserve = '1G'\n[[application]]\nname = 'a'\napi = {}\n");
    let runtime = Runtime::new().unwrap();
    let path = guest.file("api");
    let address: Address = format!("unix:{}", path.display()).parse().unwrap();
    let server = runtime.block_on(ApiServer::start(&address, guest.manager().router())).unwrap();
    let mut idle: Vec<_> = (0..64).map(|_| connect(&path)).collect();
    let mut client = connect(&path);
    client.get_mut().write_all(b"GET /v1/state HTTP/1.0\r\n\r\n").unwrap();
    client.get_mut().set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let early = host::read(client.get_mut(), &mut [0; 1]).map_err(|error| error.kind());
    assert_eq!(early, Err(io::ErrorKind::WouldBlock), "there were 64 already");
    idle.pop();
    client.get_mut().set_read_timeout(Some(patience())).unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.0 200"), "{answer}");
    runtime.block_on(server.stop());
}
