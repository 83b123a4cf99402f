//! The server side of `node.sock`.
//!
//! One thread per connection: connections are few (one of a launcher and two of a pager for each
//! consumer) and live long. The kernel names the client (`SO_PEERCRED`): only the node's user and
//! root are admitted.

use crate::causes::with_causes;
use crate::channel::{self, Receiver};
use crate::node::Inner;
use crate::pagers::OnEnd;
use crate::socket::message::{Answer, PagerAddress, PagerEnd, Request, StartPager, StartVm};
use crate::socket::pager_control;
use hecaton_pager::Guest;
use rustix::process::Pid;
use std::collections::HashMap;
use std::error::Error;
use std::io;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Most connections at a time: three for each of [`crate::pagers::MAX_PAGERS`], and some to spare.
const MAX_CONNECTIONS: usize = 3 * crate::pagers::MAX_PAGERS + 128;

/// How long a client may leave an answer unread before its connection is given up.
const WRITE_PATIENCE: Duration = Duration::from_secs(5);

/// The listening socket and its connections.
#[derive(Debug)]
pub(crate) struct ControlServer {
    listener: Arc<UnixListener>,
    connections: Arc<Connections>,
    acceptor: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Connections {
    streams: Mutex<(u64, HashMap<u64, UnixStream>)>,
}

impl ControlServer {
    /// Answers who comes to `listener`. The server ends by itself when the node is dropped.
    pub(crate) fn start(listener: UnixListener, node: Weak<Inner>) -> io::Result<ControlServer> {
        let listener = Arc::new(listener);
        let connections = Arc::new(Connections::default());
        let acceptor = thread::Builder::new().name("control".into()).spawn({
            let (listener, connections) = (Arc::clone(&listener), Arc::clone(&connections));
            move || accept(&listener, &connections, &node)
        })?;
        Ok(ControlServer { listener, connections, acceptor })
    }

    /// Closes the socket and all connections.
    pub(crate) fn stop(self) {
        // Wakes the acceptor with EINVAL; a closed descriptor would not.
        let _ = rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both);
        let _ = self.acceptor.join();
        self.connections.close_all();
    }
}

impl Connections {
    /// Keeps a way to close `stream`; `None` when there are too many.
    fn enter(&self, stream: &UnixStream) -> io::Result<Option<u64>> {
        let mut streams = self.streams.lock().expect("no thread panics with the streams");
        if streams.1.len() >= MAX_CONNECTIONS {
            return Ok(None);
        }
        streams.0 += 1;
        let id = streams.0;
        streams.1.insert(id, stream.try_clone()?);
        Ok(Some(id))
    }

    fn leave(&self, id: u64) {
        self.streams.lock().expect("no thread panics with the streams").1.remove(&id);
    }

    fn close_all(&self) {
        let streams = self.streams.lock().expect("no thread panics with the streams");
        for stream in streams.1.values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn accept(listener: &UnixListener, connections: &Arc<Connections>, node: &Weak<Inner>) {
    loop {
        let stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return,
            Err(error) => {
                // Out of descriptors, most likely: others' connections will end.
                tracing::warn!(%error, "cannot accept a control connection");
                thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        if let Err(error) = admit(stream, connections, node) {
            tracing::warn!(%error, "control connection refused");
        }
    }
}

fn admit(stream: UnixStream, connections: &Arc<Connections>, node: &Weak<Inner>) -> io::Result<()> {
    stream.set_write_timeout(Some(WRITE_PATIENCE))?;
    let refuse = |reason: String| {
        let _ = channel::send(&stream, &Answer::Refused(reason.clone()), &[]);
        io::Error::other(reason)
    };
    let peer = channel::check_peer(&stream).map_err(|error| refuse(error.to_string()))?;
    let Some(id) = connections.enter(&stream)? else {
        return Err(refuse(format!("the node has {MAX_CONNECTIONS} connections; try again later")));
    };
    let serving = {
        let (connections, node) = (Arc::clone(connections), node.clone());
        move || {
            if let Err(error) = serve(stream, &node, peer) {
                tracing::debug!(%error, pid = peer.as_raw_nonzero(), "control connection");
            }
            connections.leave(id);
        }
    };
    thread::Builder::new().name("control-client".into()).spawn(serving).map(|_| ())
}

/// The writing half: the connection's thread and a pager's supervisor write to it.
type Writer = Arc<Mutex<UnixStream>>;

fn lock(writer: &Writer) -> MutexGuard<'_, UnixStream> {
    writer.lock().expect("no thread panics while writing")
}

fn write(writer: &Writer, answer: &Answer) -> io::Result<()> {
    channel::send(&lock(writer), answer, &[])
}

/// Callback that tells the launcher on this connection of its pager's end.
fn tell_end(writer: &Writer) -> OnEnd {
    let writer = Arc::clone(writer);
    Box::new(move |end: PagerEnd| {
        // A launcher that has gone needs no telling.
        let _ = write(&writer, &Answer::PagerEnded(Box::new(end)));
    })
}

/// Starts a pager, answers, and leaves behind what will tell the pager's end on the same stream.
fn start_pager(
    node: &Inner,
    writer: &Writer,
    wish: StartPager,
    monitor: Option<PathBuf>,
    launched: &mut Vec<String>,
) -> io::Result<()> {
    // Held until the answer is out, so that the end of a short-lived pager comes after it.
    let line = lock(writer);
    let answer = told(node.pagers.start(&wish, monitor, tell_end(writer)), |address| {
        launched.push(wish.name);
        Answer::Pager(address)
    });
    channel::send(&line, &answer, &[])
}

/// The connection is the launch line of a pager that a node before this one started.
fn resume(
    node: &Inner,
    writer: &Writer,
    known: &PagerAddress,
    launched: &mut Vec<String>,
) -> io::Result<()> {
    let line = lock(writer);
    let answer = told(node.pagers.resume(known, tell_end(writer)), |address| {
        launched.push(known.name.clone());
        Answer::Pager(address)
    });
    channel::send(&line, &answer, &[])
}

/// As [`start_pager`], and follows the machine from then on.
fn start_vm(
    node: &Inner,
    writer: &Writer,
    wish: StartVm,
    launched: &mut Vec<String>,
) -> io::Result<()> {
    let number = match node.vms.enter(&wish) {
        Ok(number) => number,
        Err(error) => return write(writer, &Answer::Refused(with_causes(&error))),
    };
    let before = launched.len();
    let (name, monitor) = (wish.name.clone(), wish.monitor);
    let pager = StartPager {
        name: wish.name,
        local_bytes: wish.local_bytes,
        guest: Some(wish.guest.unwrap_or(Guest::Qemu)),
        wanted: wish.wanted,
    };
    let answered = start_pager(node, writer, pager, monitor, launched);
    if launched.len() > before {
        node.vms.follow(&name, number);
    } else {
        node.vms.forget(&name, number);
    }
    answered
}

fn serve(stream: UnixStream, node: &Weak<Inner>, peer: Pid) -> io::Result<()> {
    let writer: Writer = Arc::new(Mutex::new(stream.try_clone()?));
    let mut receiver = Receiver::new(stream);
    // The pagers that this connection launched.
    let mut launched = Vec::new();
    let result = answer_all(&mut receiver, &writer, node, peer, &mut launched);
    if let Some(node) = node.upgrade() {
        for name in launched {
            node.pagers.launch_over(&name);
        }
    }
    result
}

fn answer_all(
    receiver: &mut Receiver,
    writer: &Writer,
    node: &Weak<Inner>,
    peer: Pid,
    launched: &mut Vec<String>,
) -> io::Result<()> {
    loop {
        let request = match receiver.receive::<Request>() {
            Ok(Some(request)) => request,
            Ok(None) => return Ok(()),
            Err(error) => {
                let _ = write(writer, &Answer::Refused(error.to_string()));
                return Err(error);
            }
        };
        let Some(node) = node.upgrade() else { return Ok(()) };
        let answer = match request {
            Request::Status => Answer::Status(Box::new(node.report())),
            Request::Donors => Answer::Donors(node.directory.all()),
            Request::StartPager(wish) => {
                start_pager(&node, writer, wish, None, launched)?;
                continue;
            }
            Request::StartVm(wish) => {
                start_vm(&node, writer, wish, launched)?;
                continue;
            }
            Request::Resume(known) => {
                resume(&node, writer, &known, launched)?;
                continue;
            }
            Request::ResizeLocal(wish) => {
                told(pager_control::resize_local(&node.pagers, &wish), |()| Answer::Done)
            }
            Request::Place(wish) => {
                told(pager_control::place(&node.pagers, wish), |()| Answer::Done)
            }
            Request::Detach(name) => told(pager_control::detach(&node.pagers, &name), |()| {
                node.vms.leaves(&name);
                Answer::Done
            }),
            Request::CreateVm(wish) => told(node.create_machine(wish, peer), Answer::Admitted),
            Request::CreateVolume(wish) => {
                known(&node, node.create_volume(wish), |()| Answer::Done)
            }
            Request::ExportVolume(wish) => {
                known(&node, node.volumes.export(wish), Answer::Exported)
            }
            Request::UnexportVolume(wish) => {
                known(&node, node.volumes.unexport(&wish), |()| Answer::Done)
            }
            Request::ResizeVolume(wish) => {
                known(&node, node.volumes.resize(&wish), |()| Answer::Done)
            }
            Request::SnapshotVolume(wish) => {
                known(&node, node.volumes.snapshot(&wish), |()| Answer::Done)
            }
            Request::DeleteVolume(name) => {
                known(&node, node.volumes.delete(&name), |()| Answer::Done)
            }
            Request::DetachVolume(wish) => {
                let detached = |at: Option<_>| at.map_or(Answer::Done, Answer::Detached);
                known(&node, node.volumes.detach(&wish), detached)
            }
            Request::AttachVolume(wish) => {
                known(&node, node.volumes.attach(&wish), |()| Answer::Done)
            }
            Request::LaunchOver => {
                for name in launched.drain(..) {
                    node.pagers.launch_over(&name);
                }
                Answer::Done
            }
            Request::PagerStats(update) => {
                let word = node.division().word_for(&update.consumer);
                told(node.pagers.update_stats(*update), |()| match word {
                    Some(word) => Answer::Target { bytes: word.target_bytes },
                    None => Answer::Done,
                })
            }
        };
        write(writer, &answer)?;
    }
}

/// As [`told`], once the manager has heard of it: who asks it next finds what was done.
fn known<T, E: Error>(
    node: &Inner,
    result: Result<T, E>,
    answer: impl FnOnce(T) -> Answer,
) -> Answer {
    if result.is_ok() {
        node.tell_manager();
    }
    told(result, answer)
}

/// The answer to a request: its result, or why it failed.
fn told<T, E: Error>(result: Result<T, E>, answer: impl FnOnce(T) -> Answer) -> Answer {
    result.map_or_else(|error| Answer::Refused(with_causes(&error)), answer)
}

#[cfg(test)]
mod tests {
    use crate::children::child::ChildCommand;
    use crate::cluster::report::HeartbeatAnswer;
    use crate::node::{Node, NodeConfig};
    use crate::node_dir::NodeDir;
    use crate::socket::client::{ClientError, NodeClient};
    use crate::socket::message::{StartPager, StartVm, Wanted};
    use crate::vms::VmState;
    use hecaton_testkit::{patience, wait_until_seen};
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixStream;
    use std::path::PathBuf;

    /// A node without donors whose pagers are shell scripts, and whose manager is not there.
    fn with_node(test: impl FnOnce(&Node, PathBuf)) {
        let parent = tempfile::tempdir().expect("a directory");
        let dir = NodeDir::claim(&parent.path().join("node")).expect("claimed");
        let socket = dir.paths().control_socket();
        let script = "read config; echo ready; read over";
        let node = Node::start(NodeConfig {
            copies: 1,
            name: "a".to_owned(),
            location: None,
            dir,
            donors: Vec::new(),
            manager_url: Some("http://127.0.0.1:1".to_owned()),
            announce: None,
            credentials: None,
            adopt_within: None,
            agent: None,
            command: ChildCommand {
                program: "/bin/sh".into(),
                args: vec!["-c".into(), script.into()],
            },
        });
        let node = node.expect("started");
        test(&node, socket.clone());
        node.stop();
        assert!(!socket.exists());
        assert!(!parent.path().join("node").exists());
    }

    fn wish(name: &str) -> StartPager {
        StartPager {
            name: name.to_owned(),
            local_bytes: 1 << 24,
            guest: None,
            wanted: Wanted::default(),
        }
    }

    #[test]
    fn a_launcher_starts_a_pager_and_is_told_its_end() {
        with_node(|node, socket| {
            let mut client = NodeClient::connect(&socket).expect("connected");
            let pager = client.start_pager(wish("x")).expect("started");
            assert_eq!(pager.name, "x");
            let report = NodeClient::connect(&socket).expect("connected").status().expect("told");
            assert_eq!(report.consumers[0].pid, Some(pager.pid));
            client.launch_line().expect("a handle").over().expect("said");
            assert_eq!(client.wait_end().expect("told").error, None);
            assert_eq!(node.pagers().count(), 0);
        });
    }

    /// Each takes the locks of the node's donors and of its membership.
    #[test]
    fn what_it_is_can_be_asked_while_it_follows_its_manager() {
        with_node(|node, _| {
            let answer = HeartbeatAnswer::default();
            std::thread::scope(|scope| {
                scope.spawn(|| (0..10_000).for_each(|_| node.inner.follow(&answer)));
                (0..10_000).for_each(|_| drop(node.report()));
            });
        });
    }

    #[test]
    fn a_launcher_that_goes_away_lets_its_pager_end() {
        with_node(|node, socket| {
            let mut client = NodeClient::connect(&socket).expect("connected");
            client.start_pager(wish("x")).expect("started");
            drop(client);
            assert!(node.pagers().wait_none(patience()));
        });
    }

    #[test]
    fn a_virtual_machine_is_followed_until_its_pager_ends() {
        with_node(|node, socket| {
            let monitor = socket.with_file_name("vm-db.qmp");
            std::fs::write(&monitor, "").expect("written");
            let wish = || StartVm {
                wanted: Wanted::default(),
                name: "db".to_owned(),
                local_bytes: 1 << 24,
                monitor: Some(monitor.clone()),
                guest: None,
            };
            let connect = || NodeClient::connect(&socket).expect("connected");
            let mut launcher = connect();
            let pager = launcher.start_vm(wish()).expect("started");
            let report = connect().status().expect("told");
            assert_eq!(report.vms.len(), 1);
            assert_eq!(report.vms[0].state, VmState::Waiting);
            assert_eq!(report.consumers[0].pid, Some(pager.pid));
            let taken = connect().start_vm(wish());
            assert!(matches!(taken, Err(ClientError::Refused(reason)) if reason.contains("`db`")));
            // The scripts that stand for pagers have no control socket.
            let silent = connect().resize_local("db", 1 << 25);
            let Err(ClientError::Refused(reason)) = silent else { panic!("{silent:?}") };
            assert!(reason.contains("does not answer"), "{reason}");
            let unknown = connect().detach("x");
            assert!(matches!(unknown, Err(ClientError::Refused(reason)) if reason.contains("`x`")));

            launcher.launch_line().expect("a handle").over().expect("said");
            assert_eq!(launcher.wait_end().expect("told").error, None);
            // At once, though the first may be followed for a moment longer.
            let mut second = connect();
            second.start_vm(wish()).expect("the name is free");
            drop(second);
            assert!(node.pagers().wait_none(patience()));
            wait_until_seen("the node has forgotten the VM and its monitor", || {
                let (vms, exists) = (node.report().vms, monitor.exists());
                let seen = format!("{vms:?}, the monitor's socket exists: {exists}");
                if vms.is_empty() && !exists { Ok(()) } else { Err(seen) }
            });
        });
    }

    #[test]
    fn refusals_come_in_words_and_leave_the_connection_open() {
        with_node(|_, socket| {
            let mut client = NodeClient::connect(&socket).expect("connected");
            let refused = client.start_pager(wish("a b"));
            let Err(ClientError::Refused(reason)) = refused else { panic!("{refused:?}") };
            assert!(reason.contains("cannot be a name"), "{reason}");
            client.start_pager(wish("x")).expect("started");
        });
    }

    #[test]
    fn what_is_no_request_is_answered_and_ends_the_connection() {
        with_node(|_, socket| {
            let mut stream = UnixStream::connect(&socket).expect("connected");
            stream.write_all(b"{\"explode\":1}\n").expect("written");
            let lines: Vec<_> = BufReader::new(stream).lines().map_while(Result::ok).collect();
            assert_eq!(lines.len(), 1);
            assert!(lines[0].starts_with("{\"refused\":"), "{lines:?}");
        });
    }
}
