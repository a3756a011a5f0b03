# dualcheck. `make run` and `make test` are the only commands anyone needs.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN   := $(CURDIR)/.cache/bin
export PATH := $(BIN):$(PATH)

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
COMMIT  ?= $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
LDFLAGS := -X main.version=$(VERSION) -X main.commit=$(COMMIT)

# Where the black-box cases and the sample data are, if they are there:
#   make cases SHARED=/path/to/shared
SHARED ?=
URL    ?= http://127.0.0.1:7071
ARGS   ?=

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

.PHONY: run
run: build redis-if-possible ## build, then run everything from nothing: etcd, Redis, the server, an example to paste
	exec ./dist/dualcheck dev $(ARGS)

.PHONY: build
build: go-toolchain ## build dist/dualcheck
	@go build -trimpath -ldflags '$(LDFLAGS)' -o dist/dualcheck ./cmd/dualcheck

.PHONY: test
test: go-toolchain c-compiler redis-server ## all tests, under the race detector
	go test -race -timeout 15m ./...
	cd bench && go test -race -timeout 5m ./...

.PHONY: check
check: tools ## formatting, vet, linters, the contract, generated code
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { echo 'gofmt would change:'; gofmt -l $$(git ls-files '*.go'); exit 1; }
	go vet ./...
	golangci-lint run ./...
	cd bench && go vet ./... && golangci-lint run -c ../.golangci.yml ./...
	buf lint
	buf format --diff --exit-code
	@$(MAKE) --no-print-directory breaking generated

.PHONY: breaking
breaking: tools ## the contract against what clients may already use (api/baseline.binpb)
	buf breaking --against api/baseline.binpb

.PHONY: baseline
baseline: breaking ## after an addition to the contract: it is promised from now on
	buf build --exclude-source-info -o api/baseline.binpb

.PHONY: generate
generate: tools ## make api/gen from api/proto
	buf generate

.PHONY: generated
generated: tools ## fail if api/gen is not what api/proto makes
	@dir=$$(mktemp -d); trap 'rm -rf "$$dir"' EXIT; \
	buf generate -o "$$dir"; \
	diff -r -x openapi.go "$$dir/api/gen" api/gen || { echo 'api/gen is out of date: make generate'; exit 1; }

.PHONY: cases
cases: ## replay the black-box cases against a running server (SHARED=..., URL=...)
	@test -f '$(SHARED)/cases/run.py' || { echo 'say where the cases are: make cases SHARED=/path/to/shared'; exit 2; }
	python3 '$(SHARED)/cases/run.py' --url '$(URL)' '$(SHARED)/cases/dedup.json'

.PHONY: acceptance
acceptance: build ## cases and sample data against servers of their own, restarted and killed (SHARED=...)
	test/acceptance.sh '$(SHARED)'

# A second run under the race detector is slower and so sees fewer orders: both count.
.PHONY: torture
torture: go-toolchain c-compiler redis-server ## five minutes of faults at random, every call checked; then again with -race (DURATION=5m)
	go test -count=1 -timeout 60m -v -run TestTorture ./test/robustness -robustness.duration $(or $(DURATION),5m)
	go test -count=1 -timeout 60m -v -run TestTorture -race ./test/robustness -robustness.duration $(or $(DURATION),5m)

.PHONY: bench
bench: build bench-build bench-rivals ## dualcheck beside what would be used instead of it (ARGS="--suite goals")
	@./dist/dualcheck bench $(ARGS)

.PHONY: bench-build
bench-build: go-toolchain
	@cd bench && go build -trimpath -o ../dist/dualcheck-bench .

# What is missing is installed where that is possible; what is not there is not measured,
# and the bench says so. Debian would start servers of its own: they are told not to.
.PHONY: bench-rivals
bench-rivals:
	@missing=; \
	command -v redis-server >/dev/null || missing="$$missing redis-server"; \
	command -v mariadbd >/dev/null || [ -x /usr/sbin/mariadbd ] || missing="$$missing mariadb-server"; \
	command -v postgres >/dev/null || ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || missing="$$missing postgresql"; \
	[ -n "$$missing" ] || exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "installing$$missing" >&2; \
		apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null || echo "not all of$$missing could be installed: what is missing is not measured" >&2; \
	else echo "not installed, and so not measured:$$missing (Debian: apt-get install --no-install-recommends$$missing)" >&2; fi

.PHONY: measure
measure: go-toolchain redis-server ## the figures of docs/performance.md
	for callers in 16 64 256; do \
		go test -count=1 -timeout 60m -v -run TestRepeats ./test/measure -measure.rounds 5 -measure.slice 2s -measure.least 0.5 -measure.callers $$callers $(ARGS) | grep -E 'calls/s|FAIL|ok'; done
	go test -count=1 -v -run TestSimulation ./internal/recency -recency.sparse 1 | grep -E 'saved|FAIL|ok'
	go test -count=1 -timeout 60m -v -run TestTTLs ./test/measure -measure.longest 60s -measure.finishes 100 -measure.lost 0.02 -measure.kept 0.6 $(ARGS) | grep -E 'entries|FAIL|ok'

.PHONY: fuzz
fuzz: ## fuzz each target for a while (FUZZTIME=30s)
	@for pkg in $$(grep -rl --include='*_test.go' '^func Fuzz' internal | xargs -n1 dirname | sort -u); do \
		for f in $$(grep -hoE '^func Fuzz[A-Za-z0-9]+' $$pkg/*_test.go | sed 's/func //'); do \
			go test ./$$pkg -run '^$$' -fuzz "^$$f$$" -fuzztime $(or $(FUZZTIME),30s); done; done

.PHONY: man
man: build ## man pages in man/
	./dist/dualcheck man --dir man

.PHONY: clean
clean: ## remove what was built and the state of `make run`
	rm -rf dist man .dualcheck

.PHONY: go-toolchain
go-toolchain:
	@command -v go >/dev/null || { echo 'Go 1.26 or later is needed: https://go.dev/doc/install'; exit 1; }

# The race detector is built with C. Debian's make does not bring a compiler.
.PHONY: c-compiler
c-compiler:
	@command -v "$$(go env CC | cut -d' ' -f1)" >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends gcc libc6-dev; \
	else echo 'the race detector needs a C compiler: apt-get install gcc libc6-dev'; exit 1; fi

# Tests need a real redis-server, 7.0 or later; `make run` only runs better with one.
redis_install = if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && apt-get install -y -qq --no-install-recommends redis-server; else false; fi

.PHONY: redis-server
redis-server:
	@command -v redis-server >/dev/null || { $(redis_install); } || { echo 'the tests need redis-server: apt-get install redis-server'; exit 1; }
	@redis-server --version | grep -qE ' v=([7-9]|[1-9][0-9]+)\.' || { echo 'the tests need redis-server 7.0 or later, not'; redis-server --version; exit 1; }

.PHONY: redis-if-possible
redis-if-possible:
	@command -v redis-server >/dev/null && exit 0; echo 'installing redis-server; without it everything runs on etcd alone'; { $(redis_install); } >/dev/null 2>&1 || true

# Tools are pinned in modules of their own and built into .cache/bin; a stamp
# per module keeps them up to date.
.PHONY: tools
tools: $(BIN)/.plugins $(BIN)/.buf $(BIN)/.lint

$(BIN)/.plugins: tools/go.mod | go-toolchain
	@mkdir -p $(BIN)
	cd tools && go build -o $(BIN)/ google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc \
		github.com/grpc-ecosystem/grpc-gateway/v2/protoc-gen-grpc-gateway github.com/grpc-ecosystem/grpc-gateway/v2/protoc-gen-openapiv2
	@touch $@

$(BIN)/.buf: tools/buf/go.mod | go-toolchain
	@mkdir -p $(BIN)
	cd tools/buf && go build -o $(BIN)/buf github.com/bufbuild/buf/cmd/buf
	@touch $@

$(BIN)/.lint: tools/lint/go.mod | go-toolchain
	@mkdir -p $(BIN)
	cd tools/lint && go build -o $(BIN)/golangci-lint github.com/golangci/golangci-lint/v2/cmd/golangci-lint
	@touch $@
