//! Commands while the managers elect one that leads.

use crate::common::{hecaton, text};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

const STATUS: &str = r#"{"version":"1","uptime_ms":1000,"epoch":2,"nodes":[]}"#;

/// Reads a request without a body, and answers it.
fn answer(stream: TcpStream, status: &str, headers: &str, body: &str) -> Option<()> {
    let lines = BufReader::new(stream.try_clone().ok()?).lines();
    lines.take_while(|line| line.as_ref().is_ok_and(|line| !line.is_empty())).for_each(drop);
    let head = format!("HTTP/1.1 {status}\r\nConnection: close\r\n{headers}");
    let text = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
    (&stream).write_all(text.as_bytes()).ok()
}

/// A manager that refuses with 503 and these headers so many times, and then leads. Its URL, and
/// how often it was asked.
fn manager(refusals: usize, headers: &'static str) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("bound");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let asked = Arc::new(AtomicUsize::new(0));
    thread::spawn({
        let asked = Arc::clone(&asked);
        move || {
            for stream in listener.incoming().flatten() {
                let refused = asked.fetch_add(1, Ordering::SeqCst) < refusals;
                let _ = match refused {
                    true => answer(stream, "503 Service Unavailable", headers, "not now\n"),
                    false => answer(stream, "200 OK", "Content-Type: application/json\r\n", STATUS),
                };
            }
        }
    });
    (url, asked)
}

#[test]
fn a_command_waits_until_a_manager_leads() {
    let (url, asked) = manager(3, "Retry-After: 1\r\n");
    // The second of the two managers is dead.
    let managers = format!("{url},http://127.0.0.1:1");
    let ended = hecaton().args(["status", "--json", "--manager", &managers]).output().unwrap();
    assert!(ended.status.success(), "{}", text(&ended.stderr));
    assert!(text(&ended.stdout).contains("\"epoch\":2"), "{}", text(&ended.stdout));
    assert_eq!(asked.load(Ordering::SeqCst), 4);
}

#[test]
fn what_does_not_pass_is_not_waited_for() {
    let (url, asked) = manager(1, "");
    let ended = hecaton().args(["status", "--manager", &url]).output().unwrap();
    assert_eq!(ended.status.code(), Some(1));
    assert!(text(&ended.stderr).contains("refuses: not now"), "{}", text(&ended.stderr));
    assert_eq!(asked.load(Ordering::SeqCst), 1);
}
