//! Clusters of real processes: that they come up, are seen, heal, and leave nothing behind.

use crate::common::{
    Daemon, borrow, donor_pids, get, hecaton, runs, scratch, signal_process, status, text, wait,
    wait_until_so,
};
use hecaton_memory::{Generation, PAGE_SIZE, page_sum};
use hecaton_testkit::unused_port;
use hecaton_testkit::{wait_until, wait_until_seen};
use hecaton_transport::client::Outcome;
use hecaton_transport::protocol::Request;
use rustix::process::Signal;
use std::net::TcpListener;
use std::process::Stdio;

#[test]
fn dev_comes_up_and_leaves_nothing() {
    for signal in [Signal::TERM, Signal::INT] {
        let scratch = scratch();
        let dir = scratch.path().join("dev");
        let dev = Daemon::dev(&dir, 3);
        let status = status(&dir);
        let pids = donor_pids(&status);
        assert_eq!(pids.len(), 3);
        assert!(pids.iter().all(|&pid| runs(pid)));
        assert_eq!(dev.ready["donors"].as_array().map(Vec::len), Some(3));
        assert!(dev.end(signal).success());
        assert!(!pids.iter().any(|&pid| runs(pid)), "donors are left");
        assert!(!dir.exists(), "files are left");
    }
}

#[test]
fn status_shows_nodes_and_donors() {
    let scratch = scratch();
    let dir = scratch.path().join("dev");
    let dev = Daemon::dev(&dir, 2);
    let status = status(&dir);
    assert_eq!(status["manager"], dev.manager());
    let node = &status["nodes"][0];
    assert_eq!(node["state"], "up");
    assert_eq!(node["donors"][1]["name"], "donor-2");
    assert_eq!(node["donors"][1]["state"], "serving");
    assert_eq!(node["donors"][1]["lend_bytes"], 64 << 20);
    // The three ways to the cluster show the same.
    let by_url = hecaton().args(["status", "--manager", dev.manager()]).output().expect("runs");
    let by_env =
        hecaton().arg("status").env("HECATON_MANAGER", dev.manager()).output().expect("runs");
    for output in [by_url, by_env] {
        let table = text(&output.stdout);
        assert!(output.status.success() && table.contains("donor-2"), "{table}");
    }
    // The same donors by HTTP, and in the metrics.
    let donors: serde_json::Value =
        serde_json::from_str(&get(&format!("{}/v1/donors", dev.manager()))).expect("JSON");
    assert_eq!(donors[0]["name"], "donor-1");
    let metrics = get(&format!("{}/metrics", dev.manager()));
    let line = "hecaton_donor_serving{node=\"local\",donor=\"donor-1\"} 1.0";
    assert!(metrics.lines().any(|found| found == line), "{metrics}");
    // The metrics of the processes of a donor and of the node.
    for process in ["role=\"donor\",name=\"donor-2\"", "role=\"node\",name=\"local\""] {
        let line = format!("hecaton_process_resident_bytes{{node=\"local\",{process}}} ");
        assert!(metrics.lines().any(|found| found.starts_with(&line)), "{metrics}");
    }
}

/// As `hecaton status | head -0`, with the reader gone before anything is written.
#[test]
fn commands_that_nobody_reads_end_without_a_word() {
    let scratch = scratch();
    let dir = scratch.path().join("dev");
    let _dev = Daemon::dev(&dir, 1);
    let in_dir = ["--dir", dir.to_str().unwrap()];
    let commands: [&[&str]; 5] = [
        &[&["status"], &in_dir[..]].concat(),
        &[&["status", "--json"], &in_dir[..]].concat(),
        &[&["vm", "list"], &in_dir[..]].concat(),
        &["completion", "bash"],
        &["man"],
    ];
    for arguments in commands {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let ended = hecaton().args(arguments).stdout(writer).output().unwrap();
        assert_eq!(text(&ended.stderr), "", "{arguments:?}");
        assert_eq!(ended.status.code(), Some(141), "{arguments:?}");
    }
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let ended = hecaton().arg("status").args(in_dir).stdout(full).output().unwrap();
    assert_eq!(ended.status.code(), Some(1));
    let said = text(&ended.stderr);
    assert!(said.starts_with("hecaton: cannot write to standard output: No space"), "{said}");
}

/// The reader of a daemon's first lines may be gone.
#[test]
fn a_daemon_that_nobody_reads_goes_on() {
    let scratch = scratch();
    let dir = scratch.path().join("dev");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let arguments = ["dev", "--lend", "64M", "--donors", "1", "--dir", dir.to_str().unwrap()];
    let mut dev = hecaton().args(arguments).stdout(writer).spawn().unwrap();
    wait_until_seen("the cluster serves", || {
        let status = hecaton().args(["status", "--json", "--dir"]).arg(&dir).output().unwrap();
        let said = text(&status.stdout);
        if said.contains("\"serving\"") { Ok(()) } else { Err(said + &text(&status.stderr)) }
    });
    signal_process(dev.id(), Signal::TERM);
    assert!(wait(&mut dev).success());
}

#[test]
fn donors_may_have_all_the_descriptors_that_there_are() {
    let scratch = scratch();
    let dir = scratch.path().join("dev");
    let mut dev = std::process::Command::new("sh");
    dev.args(["-c", "ulimit -Sn 100; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_hecaton")])
        .args(["dev", "--json", "--donors", "1", "--lend", "64M", "--dir"])
        .arg(&dir);
    let _dev = Daemon::start(&mut dev);
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", donor_pids(&status(&dir))[0]))
        .expect("a process");
    let line = limits.lines().find(|line| line.starts_with("Max open files")).expect("a limit");
    let [soft, hard] = [3, 4].map(|word| line.split_whitespace().nth(word));
    assert!(soft.is_some() && soft == hard, "{line}");
}

#[test]
fn a_second_dev_is_refused() {
    let scratch = scratch();
    let dir = scratch.path().join("dev");
    let first = Daemon::dev(&dir, 1);
    let second = hecaton().args(["dev", "--dir"]).arg(&dir).output().expect("runs");
    assert_eq!(second.status.code(), Some(1));
    let error = text(&second.stderr);
    assert!(error.contains("in use by another node") && error.contains("--dir"), "{error}");
    // The first one did not notice.
    assert_eq!(donor_pids(&status(&dir)).len(), 1);
    drop(first);
}

#[test]
fn what_a_killed_dev_left_is_reused() {
    let scratch = scratch();
    let dir = scratch.path().join("dev");
    let first = Daemon::dev(&dir, 2);
    let pids = donor_pids(&status(&dir));
    first.end(Signal::KILL);
    assert!(dir.join("node.sock").exists(), "it had no time to clean up");
    wait_until("the donors end with their node", || !pids.iter().any(|&pid| runs(pid)));
    let error = hecaton().args(["status", "--dir"]).arg(&dir).output().expect("runs");
    assert_eq!(error.status.code(), Some(1));
    let second = Daemon::dev(&dir, 1);
    assert_eq!(donor_pids(&status(&dir)).len(), 1);
    assert!(second.end(Signal::TERM).success());
    assert!(!dir.exists());
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("bound");
    let address = taken.local_addr().expect("an address").to_string();
    let scratch = scratch();
    let dir = scratch.path().join("dev");
    let dev = hecaton().args(["dev", "--listen", &address, "--dir"]).arg(&dir).output();
    let manager = hecaton().args(["manager", "--listen", &address]).output();
    for output in [dev.expect("runs"), manager.expect("runs")] {
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(error.contains(&address) && error.contains("--listen"), "{error}");
    }
    assert!(!dir.exists(), "nothing is left behind");
}

#[test]
fn a_killed_donor_is_started_again() {
    let scratch = scratch();
    let dir = scratch.path().join("dev");
    let _dev = Daemon::dev(&dir, 2);
    let before = status(&dir);
    let killed = donor_pids(&before)[0];
    signal_process(killed, Signal::KILL);
    let after = wait_until_so(
        "the donor is back",
        || status(&dir),
        |status| {
            let donor = &status["nodes"][0]["donors"][0];
            donor["restarts"] == 1 && donor["state"] == "serving"
        },
    );
    let (before, after) = (&before["nodes"][0]["donors"], &after["nodes"][0]["donors"]);
    assert_eq!(after[0]["address"], before[0]["address"]);
    assert_ne!(after[0]["pid"], before[0]["pid"]);
    assert_eq!(after[1]["restarts"], 0);
}

#[test]
fn a_killed_donor_loses_no_page() {
    let scratch = scratch();
    let dir = scratch.path().join("dev");
    let _dev = Daemon::dev(&dir, 1);
    let donor = &status(&dir)["nodes"][0]["donors"][0];
    let page = [7u8; PAGE_SIZE];

    let mut before = borrow(donor, 1).expect("welcomed");
    let allocate = Request::Allocate { segment: 0, member: 0, order: 4, generation: Generation(1) };
    let Outcome::Allocated(extent) = before.call(allocate, &[]).expect("answered") else {
        panic!("no extent");
    };
    let write =
        Request::Write { extent, generation: Generation(1), pages: &[3], sums: &[page_sum(&page)] };
    assert_eq!(before.call(write, &[&page]).expect("answered"), Outcome::Done);

    signal_process(donor_pids(&status(&dir))[0], Signal::KILL);
    // The port was never closed: the new process takes what queued there.
    let mut after = wait_until_seen("the donor is back", || borrow(donor, 2));
    let boots = [&before, &after].map(|connection| connection.welcome().map(|w| w.boot));
    assert_eq!(boots[0], boots[1], "for borrowers the donor lives on");
    let read = after.call(Request::Read { extent, pages: &[3] }, &[]).expect("answered");
    assert_eq!(read, Outcome::Pages { sums: vec![page_sum(&page)], data: page.to_vec() });
    let donor_now = || status(&dir)["nodes"][0]["donors"][0].clone();
    let shown = wait_until_so("the extent is shown", donor_now, |donor| {
        donor["restarts"] == 1 && donor["stats"]["lent_pages"] == 16
    });
    assert_eq!(shown["stats"]["spaces"][0]["consumer"], "test");
}

#[test]
fn a_dev_that_follows_its_input_ends_with_it() {
    let scratch = scratch();
    let dir = scratch.path().join("dev");
    let mut dev = hecaton()
        .args(["dev", "--follow-stdin", "--donors", "1", "--lend", "64M", "--dir"])
        .arg(&dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("starts");
    wait_until("the node serves", || dir.join("node.sock").exists());
    drop(dev.stdin.take());
    assert!(wait(&mut dev).success());
    assert!(!dir.exists());
}

#[test]
fn a_manager_and_nodes_make_a_cluster() {
    let scratch = scratch();
    let manager = Daemon::start(hecaton().args(["manager", "--listen", "127.0.0.1:0", "--json"]));
    let node = |name: &str, dir: &str| {
        let mut command = hecaton();
        command
            .args(["node", "--lend", "64M", "--name", name, "--location", "rack 7"])
            .args(["--manager", manager.manager(), "--dir"])
            .arg(scratch.path().join(dir));
        command
    };
    let names = || {
        let status = get(&format!("{}/v1/status", manager.manager()));
        let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
        let nodes = status["nodes"].as_array().expect("nodes").iter();
        nodes.map(|node| node["name"].as_str().expect("a name").to_owned()).collect::<Vec<_>>()
    };
    let (mut a, mut b) =
        (node("a", "a").spawn().expect("starts"), node("b", "b").spawn().expect("starts"));
    wait_until_seen("both nodes are known", || match names() {
        names if names == ["a", "b"] => Ok(()),
        names => Err(format!("{names:?}")),
    });
    // The node's directory leads to the manager as well.
    wait_until("the node is open", || scratch.path().join("a/manager.json").exists());
    assert_eq!(status(&scratch.path().join("a"))["nodes"][0]["location"], "rack 7");

    let taken = node("a", "c").output().expect("runs");
    assert_eq!(taken.status.code(), Some(1));
    let error = text(&taken.stderr);
    assert!(error.contains("`a` is taken"), "{error}");

    signal_process(a.id(), Signal::TERM);
    assert!(wait(&mut a).success());
    assert_eq!(names(), ["b"], "it said farewell");
    signal_process(b.id(), Signal::TERM);
    assert!(wait(&mut b).success());
    assert!(!scratch.path().join("a").exists() && !scratch.path().join("c").exists());
}

#[test]
fn a_node_serves_its_own_metrics() {
    let scratch = scratch();
    let address = format!("127.0.0.1:{}", unused_port());
    // Its manager is not there, which is no reason not to start.
    let mut node = hecaton()
        .args(["node", "--name", "a", "--manager", "http://127.0.0.1:1", "--metrics", &address])
        .arg("--dir")
        .arg(scratch.path().join("a"))
        .stderr(Stdio::null())
        .spawn()
        .expect("starts");
    let url = format!("http://{address}/metrics");
    let metrics = wait_until_seen("the node serves metrics", || {
        ureq::get(&url).call()?.body_mut().read_to_string()
    });
    assert!(metrics.contains("hecaton_node_memory_bytes{node=\"a\"}"), "{metrics}");
    signal_process(node.id(), Signal::TERM);
    assert!(wait(&mut node).success());
}
