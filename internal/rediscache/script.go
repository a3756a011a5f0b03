package rediscache

import (
	"fmt"

	"github.com/redis/go-redis/v9"
)

// The scripts work on KEYS[1] alone and leave it with an expiry. Lua counts bytes
// from 1, GETRANGE from 0. A key of another type than a string is garbage: GETRANGE
// fails on it, SET replaces it.
var (
	// stageScript: ARGV are the entry and its time to live in ms. It never replaces a
	// confirmed entry: under one name there is one finish.
	stageScript = redis.NewScript(fmt.Sprintf(`
local kind = redis.pcall('GETRANGE', KEYS[1], 0, %d)
if kind == '%s' then return 'kept' end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 'ok'`, kindSize-1, confirmedKind))

	// confirmScript: ARGV are the confirmed header and the time to live in ms. It stamps
	// the stage of that nonce and digest; the body stays where it is.
	confirmScript = redis.NewScript(fmt.Sprintf(`
local header = redis.pcall('GETRANGE', KEYS[1], 0, %d)
if type(header) ~= 'string' then return 'lost' end
if header == ARGV[1] then return 'ok' end
if string.sub(header, 1, %[2]d) ~= '%[3]s' .. string.sub(ARGV[1], %[4]d, %[2]d) then return 'lost' end
redis.call('SETRANGE', KEYS[1], 0, ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 'ok'`, headerSize-1, revisionAt, stagedKind, kindSize+1))

	// fillScript: ARGV are a confirmed entry and its time to live in ms. It never
	// replaces a confirmed entry of the same or a newer revision.
	fillScript = redis.NewScript(fmt.Sprintf(`
local header = redis.pcall('GETRANGE', KEYS[1], 0, %d)
if type(header) == 'string' and string.sub(header, 1, %d) == '%s'
  and string.sub(header, %[4]d, %[5]d) >= string.sub(ARGV[1], %[4]d, %[5]d) then return 'kept' end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 'ok'`, tagAt-1, kindSize, confirmedKind, revisionAt+1, tagAt))

	// discardScript: ARGV[1] is how the damaged entry begins. It removes that one and no
	// other.
	discardScript = redis.NewScript(fmt.Sprintf(`
local header = redis.pcall('GETRANGE', KEYS[1], 0, %d)
if type(header) ~= 'string' then header = '' end
if header ~= ARGV[1] then return 'kept' end
redis.call('DEL', KEYS[1])
return 'ok'`, headerSize-1))

	// oversizeScript: ARGV[1] is the size in bytes at which no entry is. One byte of it is
	// read, if there is one.
	oversizeScript = redis.NewScript(`
local beyond = redis.pcall('GETRANGE', KEYS[1], ARGV[1], ARGV[1])
if type(beyond) ~= 'string' or beyond == '' then return 'kept' end
redis.call('DEL', KEYS[1])
return 'ok'`)
)
