//! Pagers that are shell scripts: started, killed, given up.

use super::*;
use crate::channel;
use crate::children::child::adopt_orphans;
use crate::socket::message::Wanted;
use hecaton_pager::{PagerEvent, Site};
use hecaton_testkit::{patience, wait_until_seen};
use rustix::process::{Pid, kill_process};
use std::os::fd::AsFd;
use std::sync::mpsc::Receiver;

fn pagers(script: &str) -> Pagers {
    adopt_orphans().expect("adopted");
    let command =
        ChildCommand { program: "/bin/sh".into(), args: vec!["-c".into(), script.into()] };
    Pagers::new(
        command,
        NodePaths::new("/nowhere"),
        Arc::new(DonorDirectory::new(Site::unplaced("a"), vec![])),
        1,
        None,
    )
}

/// A pager that ends in peace at the end of its input.
const GOOD: &str = "read config; echo ready; read over";

fn start(pagers: &Pagers, name: &str) -> Result<Receiver<PagerEnd>, PagerError> {
    let (told, end) = mpsc::channel();
    let on_end = Box::new(move |end| told.send(end).expect("the test listens"));
    let wish = StartPager {
        name: name.to_owned(),
        local_bytes: 1 << 24,
        guest: None,
        wanted: Wanted::default(),
    };
    pagers.start(&wish, None, on_end).map(|_| end)
}

fn kill(pagers: &Pagers) {
    let pid = pagers.reports()[0].pid.expect("a process");
    kill_process(Pid::from_raw(pid as i32).expect("not zero"), Signal::KILL).expect("killed");
}

fn wait_until_reported(pagers: &Pagers, what: &str, is_so: impl Fn(&ConsumerReport) -> bool) {
    wait_until_seen(what, || {
        let reports = pagers.reports();
        if is_so(&reports[0]) { Ok(()) } else { Err(format!("{reports:?}")) }
    });
}

#[test]
fn ends_in_peace_when_its_launcher_is_done() {
    let pagers = pagers(GOOD);
    let end = start(&pagers, "a").expect("started");
    assert_eq!(pagers.reports()[0].state, PagerState::Serving);
    pagers.launch_over("a");
    let end = end.recv_timeout(patience()).expect("ended");
    assert_eq!((end.name.as_str(), end.error), ("a", None));
    assert!(pagers.wait_none(patience()));
}

#[test]
fn without_held_descriptors_a_death_is_an_end() {
    let pagers = pagers(GOOD);
    let end = start(&pagers, "a").expect("started");
    kill(&pagers);
    let end = end.recv_timeout(patience()).expect("ended");
    assert_eq!(end.error.as_deref(), Some("it was killed by signal 9"));
}

/// Has the node hold a descriptor, as if the pager had sent it.
fn hold(pagers: &Pagers, label: &str) {
    let fd = tempfile::tempfile().expect("a file").into();
    let held = pagers.with("a", |pager| pager.held.hold(vec![label.into()], vec![fd]));
    held.expect("it is there").expect("there is room");
}

#[test]
fn with_held_descriptors_it_is_started_again_and_given_them() {
    let seen = tempfile::NamedTempFile::new().expect("a file");
    let script = format!(
        r#"read config
        case "$config" in *'"held":2'*) read labels; echo "$labels" >{} ;; esac
        echo ready
        read over"#,
        seen.path().display()
    );
    let pagers = pagers(&script);
    let end = start(&pagers, "a").expect("started");
    hold(&pagers, "state");
    hold(&pagers, "uffd-1");
    kill(&pagers);
    wait_until_reported(&pagers, "the next pager serves", |report| {
        report.restarts == 1 && report.state == PagerState::Serving
    });
    let seen = std::fs::read_to_string(seen.path()).expect("written");
    assert_eq!(seen.trim(), r#"["state","uffd-1"]"#);
    pagers.launch_over("a");
    assert_eq!(end.recv_timeout(patience()).expect("ended").error, None);
}

#[test]
fn what_a_pager_sent_is_held_before_the_next_is_started() {
    let pagers = pagers(GOOD);
    let end = start(&pagers, "a").expect("started");
    let (ours, theirs) = UnixStream::pair().expect("a socket pair");
    let file = tempfile::tempfile().expect("a file");
    let send = |event: PagerEvent, fds: &[_]| channel::send(&theirs, &event, fds).expect("sent");
    let labels = |labels: &[&str]| labels.iter().map(|&label| label.to_owned()).collect();
    send(PagerEvent::HoldFds(labels(&["a", "b"])), &[file.as_fd(), file.as_fd()]);
    send(PagerEvent::DropFds(labels(&["a"])), &[]);
    drop(theirs);
    let receiver = channel::Receiver::new(ours.try_clone().expect("a descriptor"));
    pagers.hold_what_comes("a", &ours, receiver);
    assert_eq!(pagers.reports()[0].held_fds, 1);
    pagers.launch_over("a");
    assert_eq!(end.recv_timeout(patience()).expect("ended").error, None);
}

#[test]
fn one_that_ends_by_itself_is_not_started_again() {
    let pagers = pagers("read config; echo ready; read nothing; exit 3");
    let end = start(&pagers, "a").expect("started");
    hold(&pagers, "state");
    pagers.launch_over("a");
    let end = end.recv_timeout(patience()).expect("ended");
    assert_eq!(end.error.as_deref(), Some("it ended with status 3"));
}

#[test]
fn one_that_keeps_dying_is_given_up_with_the_reason() {
    let pagers = pagers(r#"read config; echo ready; sleep 0.05; exit 101"#);
    let end = start(&pagers, "a").expect("started");
    hold(&pagers, "state");
    let error = end.recv_timeout(patience()).expect("ended").error.expect("a reason");
    assert!(error.contains("20 times") && error.contains("status 101"), "{error}");
}

#[test]
fn a_launcher_that_is_done_while_it_restarts_is_not_forgotten() {
    let pagers = pagers("read config; sleep 0.2; echo ready; read over");
    let end = start(&pagers, "a").expect("started");
    hold(&pagers, "state");
    kill(&pagers);
    wait_until_reported(&pagers, "the pager is started again", |report| report.restarts == 1);
    pagers.launch_over("a");
    assert_eq!(end.recv_timeout(patience()).expect("ended").error, None);
}

#[test]
fn one_that_does_not_start_is_refused_with_its_reason() {
    let pagers = pagers("exit 4");
    let error = start(&pagers, "a").expect_err("refused").to_string();
    assert!(error.contains("it ended with status 4"), "{error}");
    assert_eq!(pagers.count(), 0);
}

#[test]
fn a_name_is_given_once() {
    let pagers = pagers(GOOD);
    let end = start(&pagers, "a").expect("started");
    assert!(matches!(start(&pagers, "a"), Err(PagerError::NameTaken(_))));
    assert!(matches!(start(&pagers, "../a"), Err(PagerError::Name(_))));
    pagers.launch_over("a");
    end.recv_timeout(patience()).expect("ended");
    assert!(pagers.wait_none(patience()));
    let end = start(&pagers, "a").expect("free again");
    pagers.stop();
    end.recv_timeout(patience()).expect("ended");
    assert!(matches!(start(&pagers, "b"), Err(PagerError::Stopping)));
}
