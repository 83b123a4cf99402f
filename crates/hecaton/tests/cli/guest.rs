//! `hecaton guest` with the memory of this machine.

use crate::common::{Daemon, get, hecaton, scratch, text, wait_until_so};
use hecaton_testkit::patience;
use rustix::process::Signal;
use serde_json::Value;
use std::fs;
use std::io::{BufReader, Write as _};
use std::os::unix::net::UnixListener;

const CONFIG: &str = "reserve = '16M'\nfree = '0'\n[[application]]\nname = 'a'\n\
    hook = { command = ['sh', '-c', 'echo $HECATON_REASON $HECATON_LIMIT_BYTES >> DIR/told'] }\n";

#[test]
fn it_answers_the_host_and_ends_and_is_started_again_after_a_kill() {
    let dir = scratch();
    let file = |name: &str| dir.path().join(name);
    let config = CONFIG.replace("DIR", dir.path().to_str().expect("text"));
    fs::write(file("guest.toml"), config).expect("written");
    let host = UnixListener::bind(file("port")).expect("bound");
    let socket = format!("unix:{}", file("api").display());
    let start = || {
        let mut command = hecaton();
        command.args(["guest", "--json", "--serve", "127.0.0.1:0", "--serve", &socket]);
        command.arg("--config").arg(file("guest.toml")).arg("--port").arg(file("port"));
        Daemon::start(&mut command)
    };
    let state = |guest: &Daemon| -> Value {
        let address = guest.ready["serves"][0].as_str().expect("an address");
        serde_json::from_str(&get(&format!("http://{address}/v1/state"))).expect("JSON")
    };
    let hear = |stream: &mut dyn std::io::BufRead| -> Value {
        let mut line = String::new();
        stream.read_line(&mut line).expect("a line");
        serde_json::from_str(&line).expect("JSON")
    };

    let guest = start();
    let mut stream = BufReader::new(host.accept().expect("it connects").0);
    stream.get_ref().set_read_timeout(Some(patience())).expect("set");
    assert_eq!(hear(&mut stream)["message"], "hello");
    let settled = wait_until_so(
        "the application is told",
        || state(&guest),
        |state| {
            let one = &state["applications"][0];
            one["status"] == "settled" && one["order"] == 1
        },
    );
    let total = settled["total_bytes"].as_u64().expect("a number");
    assert_eq!(settled["applications"][0]["limit_bytes"], total - (16 << 20));

    // The machine has as much memory as its kernel counts, and must have 8 MiB less.
    let target = format!(
        "{{\"message\":\"target\",\"id\":1,\"size_bytes\":{total},\"target_bytes\":{}}}\n",
        total - (8 << 20)
    );
    stream.get_mut().write_all(target.as_bytes()).expect("said");
    let ready = hear(&mut stream);
    assert_eq!((&ready["message"], &ready["id"]), (&"ready".into(), &1.into()), "{ready}");
    let told = fs::read_to_string(file("told")).expect("told");
    let limits =
        [format!("start {}", total - (16 << 20)), format!("shrink {}", total - (24 << 20))];
    assert_eq!(told.lines().collect::<Vec<_>>(), limits);

    assert!(!guest.end(Signal::KILL).success());
    drop(stream);
    // Its socket is there still, and is no obstacle.
    let again = start();
    let mut stream = BufReader::new(host.accept().expect("it connects").0);
    assert_eq!(hear(&mut stream)["message"], "hello");
    wait_until_so(
        "the manager has forgotten its target",
        || state(&again),
        |state| state["target"].is_null() && state["applications"][0]["order"] == 1,
    );
    assert!(again.end(Signal::TERM).success());
    assert!(!file("api").exists());
}

#[test]
fn what_is_wrong_is_said_in_one_line() {
    let dir = scratch();
    let file = dir.path().join("guest.toml");
    let path = file.to_str().expect("text");
    let run = |config: &str, more: &[&str]| {
        fs::write(&file, config).expect("written");
        let output = hecaton().args(["guest", "--config", path]).args(more).output();
        let output = output.expect("the command starts");
        let error = text(&output.stderr);
        assert_eq!(error.lines().count(), 1, "{error}");
        (output.status.code(), error)
    };
    for (config, more, words) in [
        ("reserve = 1", &[][..], [path, "line 1"]),
        ("reserve = '1G'\nrest = 1\n", &[], ["line 2", "rest"]),
        ("reserve = '1G'\n", &[], ["--config", "no application"]),
        (CONFIG, &["--serve", "0.0.0.0:80"], ["--serve", "loopback"]),
        (CONFIG, &["--serve", "/run/x"], ["'/run/x'", "unix:/PATH"]),
    ] {
        let (code, error) = run(config, more);
        assert_eq!(code, Some(2), "{error}");
        assert!(words.iter().all(|word| error.contains(word)), "{words:?}: {error}");
    }
    fs::remove_file(&file).expect("removed");
    let output = hecaton().args(["guest", "--config", path]).output().expect("starts");
    assert!(text(&output.stderr).contains("cannot be read: No such file"));
    assert_eq!(output.status.code(), Some(1));
}
