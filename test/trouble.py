#!/usr/bin/env python3
"""Makes trouble for a Redis while something else runs, until it is killed.

  trouble.py HOST:PORT garbage   every entry becomes garbage, again and again
  trouble.py HOST:PORT kill      the server is killed, whenever it is back
"""
import os, signal, socket, sys, time

host, port = sys.argv[1].rsplit(":", 1)
done = 0


def told(*_):
    print("trouble: %d times" % done)
    sys.exit(0 if done else "no trouble was made")


signal.signal(signal.SIGTERM, told)


def answer(f):
    line = f.readline()
    if not line:
        raise OSError("closed")
    kind, rest = line[:1], line[1:].strip()
    if kind == b"$":
        return None if rest == b"-1" else f.read(int(rest) + 2)[:-2]
    if kind == b"*":
        return [answer(f) for _ in range(int(rest))]
    return rest


def call(f, *words):
    words = [w if isinstance(w, bytes) else str(w).encode() for w in words]
    f.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(w), w) for w in words))
    f.flush()
    return answer(f)


def garble(f):
    """Cuts, flips, forges or retypes every entry there is."""
    global done
    cursor = b"0"
    while True:
        cursor, keys = call(f, "SCAN", cursor, "MATCH", "dc:*", "COUNT", 1000)
        for n, key in enumerate(keys):
            old = call(f, "GET", key) or b""
            if isinstance(old, bytes) and old.startswith(b"WRONGTYPE"):
                old = b""
            how = (n + done) % 5
            if how == 0:
                call(f, "SET", key, old[:-1])
            elif how == 1:
                call(f, "SET", key, bytes(b ^ 1 for b in old))
            elif how == 2:
                call(f, "SET", key, b"c1" + b"\0" * 48 + b"9" * 19 + b"\0" * 32 + b"forged")
            elif how == 3:
                call(f, "DEL", key)
                call(f, "LPUSH", key, "a list")
            else:
                call(f, "SET", key, os.urandom(200))
            done += 1
        if cursor == b"0":
            return


while True:
    try:
        with socket.create_connection((host, int(port)), 1) as s:
            f = s.makefile("rwb")
            if sys.argv[2] == "garbage":
                while True:
                    garble(f)
                    time.sleep(0.002)
            info = call(f, "INFO", "server").decode()
            pid = int(info.split("process_id:")[1].split()[0])
            time.sleep(1.5 if done else 0.1)  # one that dies young twice is started elsewhere
            os.kill(pid, signal.SIGKILL)
            done += 1
    except (OSError, ValueError):
        time.sleep(0.02)
